"""Reads slots that hold several tokens in a codec of fewer bits than the pool's, see `EvictionMethod.low_codec`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.codecs.slots import SlotCodec
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.layout import LOW, STATE
from ksana_jax.ops.pool import KVCache


class LowSlots(NamedTuple):
    """The tokens in few bits of a source of keys and values.

    per_slot: tokens that a slot holds at most. counts: blocks [..., P] -> tokens in few bits in slots [..., K, P*B].
    read: blocks [..., P] -> keys and values [..., K, P*B*per_slot, H], in float32, keys times their factors.
    factors: block tables [S, P] -> the factors of keys [S, K, H]; None if there are none.
    """

    per_slot: int
    counts: Callable[[jax.Array], jax.Array]
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    factors: Callable[[jax.Array], jax.Array] | None = None

    @classmethod
    def of(cls, cache: KVCache, layer: int | jax.Array, method: EvictionMethod, head_dim: int) -> LowSlots:
        """Returns those of one layer."""
        codec = slot_codec(cache.kv, method, head_dim)
        read = functools.partial(_counts, cache, layer), functools.partial(_read, cache, layer, codec)

        def factors(tables):  # in a row's first block, see `row_state`
            found = cache.leaves[STATE][tables[:, 0], layer, 0]
            return jnp.where(found > 0, found, 1)

        return cls(codec.per_slot, *read, factors if method.balances else None)

    def pieces(
        self, tables, starts, ends, block_size: int, piece: int
    ) -> tuple[jax.Array, Callable[[Any], tuple[Any, Any, Any, Any]]]:
        """Returns the number of pieces of block tables, after which no slot holds tokens in few bits, and a function of
        a piece that returns its keys, values, their slots' positions, and which of these places hold no token.

        Args:
          tables, starts: [S, P]. ends: [S], positions after the last slot in use. piece: blocks in each.
        """

        def positions(starts):
            return (starts[:, :, None] + jnp.arange(block_size)).reshape(len(starts), -1)

        # As many in each head. Slots that are not in use may hold anything.
        has_some = (self.counts(tables)[:, 0] > 0) & (positions(starts) < ends[:, None])
        factors = None if self.factors is None else self.factors(tables)[:, :, None]
        last = jnp.max(jnp.where(has_some, 1 + jnp.arange(has_some.shape[1]), 0))

        def read(i):
            ids, at = (jax.lax.dynamic_slice_in_dim(x, i * piece, piece, axis=1) for x in (tables, starts))
            is_empty = jnp.arange(self.per_slot) >= self.counts(ids)[..., None]
            k, v = self.read(ids)
            k = k if factors is None else k / factors
            return k, v, jnp.repeat(positions(at), self.per_slot, axis=1), _flat(is_empty)

        return -(-last // (piece * block_size)), read


def _flat(x: jax.Array) -> jax.Array:
    """[..., C, n] -> [..., C * n]."""
    return x.reshape(*x.shape[:-2], -1)


def slot_codec(kv: jax.Array, method: EvictionMethod, head_dim: int) -> SlotCodec:
    """Returns how slots of the leaf kv [..., W] hold tokens in a method's codec of few bits."""
    return SlotCodec(find_codec(method.low_codec), head_dim, kv.shape[-1] * kv.dtype.itemsize)


def _counts(cache: KVCache, layer: int | jax.Array, block_ids: jax.Array) -> jax.Array:
    return _flat(jnp.moveaxis(cache.leaves[LOW][block_ids, layer, 0], -2, -3))


def _read(
    cache: KVCache, layer: int | jax.Array, codec: SlotCodec, block_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def side(index):
        found = jnp.moveaxis(cache.kv[block_ids, layer, index], -3, -4)  # [..., K, P, B, W]
        found = found.reshape(*found.shape[:-3], -1, found.shape[-1])
        return codec.decoded(codec.split(found, jnp), jnp)

    return side(0), side(-1)
