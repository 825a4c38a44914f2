"""Keeps the tokens that an eviction method drops in fewer bits, several to a slot, see `EvictionMethod.low_codec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.kv.eviction.base import Cached, EvictionMethod
from ksana_jax.kv.layout import LOW
from ksana_jax.kv.moves import Evictions
from ksana_jax.ops.low_slots import slot_codec


class Split(NamedTuple):
    """Rows before an eviction, their tokens in full precision apart from those in few bits; n rows, C slots.

    high_first: [n, Lg, K, C], the slots of the former in their order, then the others. asked: the eviction among them.
    num_low: [n] tokens in few bits. low_slots: [n] slots that hold such tokens afterwards.
    """

    high_first: jax.Array
    asked: Evictions
    num_low: jax.Array
    low_slots: jax.Array

    @classmethod
    def of(cls, rows: dict[str, jax.Array], asked: Evictions, method: EvictionMethod, head_dim: int) -> Split:
        """rows: leaves of the rows, by slot."""
        used = jnp.arange(rows[LOW].shape[4]) < asked.num_tokens[:, None, None, None]
        counts = jnp.where(used, rows[LOW][:, :, 0].astype(jnp.int32), 0)
        # Heads and layers have equally many; the last groups of a kind may have fewer layers, but all have the first.
        num_low, old_slots = counts[:, 0, 0].sum(axis=-1), (counts[:, 0, 0] > 0).sum(axis=-1)
        num_high, per_slot = asked.num_tokens - old_slots, slot_codec(rows["kv"], method, head_dim).per_slot
        stay = asked.num_sinks + asked.num_recent
        low_slots = method.low_slots(num_high + num_low, asked.num_kept, stay, per_slot, jnp)
        asked = asked._replace(num_tokens=num_high, num_kept=asked.num_kept - low_slots)
        return cls(jnp.argsort((counts > 0) | ~used, axis=-1), asked, num_low, low_slots)


def demoted(
    rows: dict[str, jax.Array],
    split: Split,
    cached: Cached,
    order: jax.Array,
    kept: jax.Array,
    move: Callable[[jax.Array], dict[str, jax.Array]],
    method: EvictionMethod,
) -> dict[str, jax.Array]:
    """Returns the leaves of rows after an eviction: sinks, then slots of tokens in few bits, then the other tokens.

    Args:
      rows: leaves before it, by slot.
      cached: tokens in full precision. order, kept: [n, Lg, K, C], slots of `cached` in the order in which they stay,
        and those that stay, rising.
      move: slots [n, Lg, K, C] of `cached` -> leaves whose tokens come from them.
    """
    asked, num_slots = split.asked, order.shape[-1]
    slots = jnp.arange(num_slots)
    sinks, low_slots, num_low, num_high, num_kept = (
        x[:, None, None, None]
        for x in (asked.num_sinks, split.low_slots, split.num_low, asked.num_tokens, asked.num_kept)
    )
    at = jnp.where(slots < sinks, slots, jnp.maximum(slots - low_slots, 0))
    new = move(jnp.take_along_axis(kept, jnp.broadcast_to(at, kept.shape), axis=-1))
    goes = (slots < num_high) & (jnp.argsort(order, axis=-1) >= num_kept)
    gone = jnp.minimum(jnp.sort(jnp.where(goes, slots, num_slots)), num_slots - 1)

    codec, kv = slot_codec(rows["kv"], method, cached.keys.shape[-1]), rows["kv"]
    per_slot = codec.per_slot
    sides = (cached.keys, cached.values)[: kv.shape[2]]
    if method.balances:
        sides = (sides[0] * method.low_factors(cached, jnp)[:, :, :, None], *sides[1:])
    encoded = (codec.encoded(jnp.take_along_axis(x, gone[..., None], axis=3), jnp) for x in sides)
    tokens = jnp.concatenate([codec.split(kv, jnp), jnp.stack(list(encoded), axis=2)], axis=4)
    # Tokens that were in few bits, then those that join them; the oldest go where there are too many.
    count = num_low + num_high - num_kept
    held = jnp.minimum(count, per_slot * low_slots)
    nth = jnp.arange(num_slots * per_slot) - per_slot * sinks + count - held
    index = jnp.where(nth < num_low, per_slot * sinks + nth, num_slots * per_slot + nth - num_low)
    index = jnp.clip(index, 0, tokens.shape[4] - 1)[:, :, None, :, :, None]
    packed = codec.joined(jnp.take_along_axis(tokens, index, axis=4), kv.dtype, jnp)
    is_low = (slots >= sinks) & (slots < sinks + low_slots)
    in_slot = jnp.clip(held - (slots - sinks) * per_slot, 0, per_slot)
    new["kv"] = jnp.where(is_low[:, :, None, :, :, None], packed, new["kv"])
    counts = jnp.where(is_low, in_slot, 0).astype(new[LOW].dtype)[:, :, None]
    return new | {LOW: jnp.broadcast_to(counts, new[LOW].shape)}
