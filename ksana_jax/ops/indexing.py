"""Selection of tokens by an indexer in one layer of a step: its keys in the pool, and the slots that queries read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.kv.layout import INDEX_KEY
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.methods.selection.lightning_indexer import index_scores
from ksana_jax.ops.attention import slot_positions
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import TileGroup


def write_index(cache: KVCache, context: AttentionContext) -> KVCache:
    """Stores the keys of a layer's indexer at the batch's slots."""
    assert context.indexed is not None
    keys = context.indexed.keys[:, None]
    written = cache.of_index.write(context.layer, context.batch.slots, keys, keys)
    return cache.with_leaves(cache.leaves | {INDEX_KEY: written.kv})


def select_tokens(
    method: SelectionMethod, cache: KVCache, batch: Any, context: AttentionContext, part: TileGroup, tokens: slice
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens that the queries of a part read, as blocks of `KVCache.by_token`, and their positions: [T, 1,
    C], rising; those that are later than the query fill the rows of short texts.

    Args:
      batch: of the part alone. tokens: its tokens among those of the step.
    """
    assert context.indexed is not None
    size, num_layers, keys = cache.block_size, cache.kv.shape[1], cache.of_index
    q, weights, _ = (x[tokens].reshape(*part, *x.shape[1:]) for x in context.indexed)
    positions = batch.cache_positions.reshape(*part, 1)

    # One tile at a time: scores of all heads take Q * Hi * C numbers.
    def of_tile(tile):
        q, weights, position, table, starts = tile
        at = slot_positions(starts[None], size)[0]
        scores = index_scores(q, weights, keys.read(context.layer, table)[0][0], jnp)
        _, chosen = jax.lax.top_k(jnp.where(at <= position, scores, -jnp.inf), method.budget)
        chosen = jnp.sort(chosen, axis=-1)
        return (table[chosen // size] * num_layers + context.layer) * size + chosen % size, at[chosen]

    found = jax.lax.map(of_tile, (q, weights, positions, batch.block_tables, batch.block_starts))
    slots, at = (x.reshape(part.count * part.width, 1, -1) for x in found)
    return slots, at
