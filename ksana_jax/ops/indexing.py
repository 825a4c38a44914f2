"""Selection of tokens by an indexer in one layer of a step: its keys in the pool, and attention to what it chooses."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.kv.layout import INDEX_KEY
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.methods.selection.lightning_indexer import index_scores
from ksana_jax.ops.attention import slot_positions
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.implementations import PagedAttention
from ksana_jax.ops.kv_write import Queries
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import StepShape, TileGroup


class Part(NamedTuple):
    """One part of a step, of `StepShape.places`: its tiles' shape, and where its tokens and its tiles are."""

    part: TileGroup
    tokens: slice
    tiles: slice


def write_index(cache: KVCache, context: AttentionContext) -> KVCache:
    """Stores the keys of a layer's indexer at the batch's slots."""
    assert context.indexed is not None
    keys = context.indexed.keys[:, None]
    written = cache.of_index.write(context.layer, context.batch.slots, keys, keys)
    return cache.with_leaves(cache.leaves | {INDEX_KEY: written.kv})


def attend_chosen(
    method: SelectionMethod,
    attention: PagedAttention,
    q: jax.Array,
    cache: KVCache,
    context: AttentionContext,
    of: Part,
) -> jax.Array:
    """Attends the queries q of a part, [count * width, N, H], to the tokens that its indexer chooses.

    One tile at a time reads its tokens into a small pool of blocks of one token. A view of the whole pool as such
    blocks would be copied by XLA in each layer.
    """

    def of_tile(tile):
        q, *asked, positions, cache_positions = tile
        slots, at = _choose(method, cache, context, (*asked, cache_positions))
        width, count = at.shape
        tables = jnp.arange(width * count, dtype=jnp.int32).reshape(width, 1, count)
        batch = context.batch._replace(
            positions=positions,
            cache_positions=cache_positions,
            block_tables=tables,
            block_starts=at[:, None],
            query_numbers=None,
        )
        shape = StepShape((TileGroup(width, 1),), count, width)
        where = context._replace(layer=0, batch=batch, shape=shape, num_repositioned_sinks=0)
        return attention.attend(Queries(q, None), cache.of_slots(slots.reshape(-1)), where, None).out

    given = (q, context.batch.positions[of.tokens], context.batch.cache_positions[of.tokens])
    q, *positions = (x.reshape(*of.part, *x.shape[1:]) for x in given)
    return jax.lax.map(of_tile, (q, *_asked(context, of), *positions)).reshape(given[0].shape)


def chosen_positions(method: SelectionMethod, cache: KVCache, context: AttentionContext, of: Part) -> jax.Array:
    """Returns the rising positions of the tokens that the queries of a part read, [S, Q, 1, C]; in short texts, some
    are later than the query."""
    cache_positions = context.batch.cache_positions[of.tokens].reshape(of.part)
    choose = functools.partial(_choose, method, cache, context)
    return jax.lax.map(choose, (*_asked(context, of), cache_positions))[1][:, :, None]


def _asked(context: AttentionContext, of: Part) -> tuple[jax.Array, ...]:
    """Returns the indexer's queries and weights of a part by tile, and the tables of tiles."""
    assert context.indexed is not None
    q, weights, _ = (x[of.tokens].reshape(*of.part, *x.shape[1:]) for x in context.indexed)
    return q, weights, context.batch.block_tables[of.tiles], context.batch.block_starts[of.tiles]


def _choose(
    method: SelectionMethod, cache: KVCache, context: AttentionContext, tile: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the slots of the tokens that the queries of a tile read, as rows of a leaf's flat view, and their
    positions: [Q, C]."""
    q, weights, table, starts, position = tile
    size, num_layers = cache.block_size, cache.kv.shape[1]
    at = slot_positions(starts[None], size)[0]
    scores = index_scores(q, weights, cache.of_index.read(context.layer, table)[0][0], jnp)
    _, chosen = jax.lax.top_k(jnp.where(at <= position[:, None], scores, -jnp.inf), method.budget)
    chosen = jnp.sort(chosen, axis=-1)
    return (table[chosen // size] * num_layers + context.layer) * size + chosen % size, at[chosen]
