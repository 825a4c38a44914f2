"""Sources of keys and values for attention in one layer: its group's blocks, or with a block codec blocks of codes
and blocks of exact tokens. Each part of the text is read from one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.layout import HIDDEN
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.low_slots import LowSlots
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.sealed_pool import SealedCache


class Tables(NamedTuple):
    """Blocks by position, of tiles [S, P] or, where shared, of groups of rows [C, P]; starts is FAR if absent."""

    blocks: Any
    starts: Any


class Source(NamedTuple):
    """A part of the text as keys and values in blocks.

    num_kv_heads: K.
    read: blocks [..., P] -> keys and values [..., K, P*B, H]. Where keys and values are in different blocks, blocks are
      [..., P, 2].
    tables, shared: of the step.
    unrotated_keys: whether keys must be rotated.
    end: position of each tile's newest token [S] -> the positions from which on none of its queries reads.
    has: (positions of queries, positions of keys) -> whether it has the keys for the queries; None where it has all.
    hidden: blocks [..., P] -> whether slots [..., K, P*B] hold tokens that no query sees; None if there are none.
    low: slots that hold several tokens in few bits, which are hidden too; None if there are none.
    """

    num_kv_heads: int
    block_size: int
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    tables: Tables
    shared: Tables
    unrotated_keys: bool
    end: Callable[[jax.Array], jax.Array]
    has: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    hidden: Callable[[jax.Array], jax.Array] | None = None
    low: LowSlots | None = None


def sources(cache: KVCache, context: AttentionContext) -> tuple[Source, ...]:
    """Returns the sources of a layer's queries."""
    batch, observer, heads = context.batch, context.observer, cache.kv.shape[3]

    def after(newest):
        return newest + 1

    tables = Tables(batch.block_tables, batch.block_starts), Tables(batch.shared_tables, batch.shared_starts)
    if not isinstance(cache, SealedCache):
        unrotated = observer is not None and observer.unrotated_keys
        source = Source(heads, cache.block_size, lambda ids: cache.read(context.layer, ids), *tables, unrotated, after)
        if observer is not None and observer.method.low_codec:
            low = LowSlots.of(cache, context.layer, observer.method, 2 * context.rope.inv_freq.shape[-1])
            return (source._replace(hidden=lambda ids: low.counts(ids) > 0, low=low),)
        hides = observer is not None and observer.method.hides
        return (source._replace(hidden=lambda ids: _hidden(cache, context.layer, ids)) if hides else source,)
    size, sealing = cache.size, cache.blocks.sealing
    assert context.residual is not None
    (k_at, k_batch), (v_at, v_batch) = context.residual

    def both(k, v):
        return None if k is None else jnp.stack([k, v], axis=-1)

    exact_tables = (
        Tables(both(k_batch.block_tables, v_batch.block_tables), k_batch.block_starts),
        Tables(both(k_batch.shared_tables, v_batch.shared_tables), k_batch.shared_starts),
    )

    def exact_from(positions):
        return sealing.exact_from(positions, size, jnp)

    def reads_codes(q_pos, kv_pos):
        return (kv_pos < exact_from(q_pos)) & (kv_pos >= sealing.first)

    def read_exact(ids):
        return cache.read_side(k_at, ids[..., 0]), cache.read_side(v_at, ids[..., 1])

    common, unrotated = (heads, size), cache.unrotated_keys or (observer is not None and observer.unrotated_keys)
    codes = Source(
        *common,
        lambda ids: cache.read_codes(context.layer, ids),
        *tables,
        unrotated,
        exact_from,
        reads_codes,
    )
    if observer is not None:
        own = exact_tables[0]
        exact_tables = own._replace(starts=_starts_in_cache(own.starts, context, sealing.first)), exact_tables[1]
    exact = Source(*common, read_exact, *exact_tables, unrotated, after, lambda q, kv: ~reads_codes(q, kv))
    return codes, exact


def _starts_in_cache(starts: jax.Array, context: AttentionContext, first: int) -> jax.Array:
    """Returns the cache positions at which blocks of exact tokens begin. starts: [S, P] in the sequence."""
    evicted = context.batch.positions - context.batch.cache_positions
    of_tiles = [evicted[tokens].reshape(*part)[:, :1] for part, tokens, _ in context.shape.places()]
    shifted = starts - jnp.concatenate(of_tiles)
    # The first tokens are sinks. Blocks that no query reads any more may begin before them.
    shifted = jnp.where((shifted < first) | (starts >= FAR), FAR, shifted)
    return jnp.where(starts < first, starts, shifted)


def _hidden(cache: KVCache, layer: int | jax.Array, block_ids: jax.Array) -> jax.Array:
    """Returns whether tokens in slots [..., K, P*B] of blocks [..., P] are hidden in one layer."""
    found = jnp.moveaxis(cache.leaves[HIDDEN][block_ids, layer, 0], -2, -3)
    return found.reshape(*found.shape[:-2], -1)
