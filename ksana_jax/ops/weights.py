"""Attention in one layer with its weights, for inspection: all keys of a query at once. Writes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.ops.attention import by_kv_head, by_token, masked_scores, read_keys, sink_keys, sinks_of, slot_positions
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.indexing import Part, chosen_positions
from ksana_jax.ops.kv_write import Queries
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.selection import select
from ksana_jax.ops.sources import sources
from ksana_jax.ops.tiles import Tiles
from ksana_jax.scheduler.step.types import TileGroup


def attention_weights(
    queries: Queries, cache: KVCache, context: AttentionContext, selection: SelectionMethod | None
) -> tuple[jax.Array, list[list[tuple[jax.Array, jax.Array]]]]:
    """Attends each packed token to the cached slots of its row, as `ragged_paged_attention` and `attend_selected` do.

    Returns:
      The result [T, N, H]. For each part of the step and each source of keys the weights [S, Q, N, C] in float32, -1
      where a query does not attend to a slot, and the cache positions of the slots [S, C].
    """
    places = context.shape.places()
    outs, weights = zip(*(_of_part(queries, cache, context, selection, *place) for place in places), strict=True)
    return jnp.concatenate(outs), list(weights)


def _of_part(queries: Queries, cache, context: AttentionContext, selection, part: TileGroup, tokens, tiles):
    batch, of_layer = context.batch, sources(cache, context)
    of_tokens = *queries, batch.cache_positions, batch.positions
    tiled = [None if x is None else x[tokens].reshape(*part, *x.shape[1:]) for x in of_tokens]
    heads, scores, values, slots = of_layer[0].num_kv_heads, [], [], []
    for source in of_layer:
        tables = source.tables.blocks[tiles]
        asked = Tiles(*tiled, numbers=None, tables=tables, starts=source.tables.starts[tiles])
        k, v, at, hidden = read_keys(asked, asked.tables, asked.starts, source, context)
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        where = at, hidden, asked, source, context
        found = masked_scores(by_kv_head(asked.q, heads), k, *where)
        if asked.q_sink is not None:
            of_sinks = by_kv_head(asked.q_sink, heads), sink_keys(k, at, asked, context)
            found = jnp.maximum(found, masked_scores(*of_sinks, *where, sinks=True))
        if selection is not None and asked.tables.shape[1] > selection.num_blocks(cache.block_size):
            reads = _selected(selection, queries.q[tokens], cache, context, part, tokens, tiles)
            found = jnp.where(reads, found, -jnp.inf)
        scores.append(found)
        # Slots after a tile's newest token may hold anything; a weight of 0 does not silence a NaN there.
        values.append(jnp.where((at < asked.slots_end(source.end)[:, None])[:, None, :, None], v, 0))
        slots.append(at)
    logits = jnp.concatenate(scores, axis=-1)
    top = jnp.maximum(logits.max(axis=-1, keepdims=True), -1e30)  # finite for padding, which sees nothing
    total = jnp.exp(logits - top).sum(axis=-1, keepdims=True)
    if context.sink_logits is not None:
        total += jnp.exp(by_kv_head(sinks_of(context, (*part, len(context.sink_logits), 1)), heads) - top)
    weights = jnp.exp(logits - top) / jnp.maximum(total, 1e-30)
    out = by_token(jnp.einsum("SKRC,SKCH->SKRH", weights, jnp.concatenate(values, axis=2)), part.width)
    weights = by_token(jnp.where(jnp.isfinite(logits), weights, -1), part.width)
    each = jnp.split(weights.reshape(*part, *weights.shape[1:]), [scores[0].shape[-1]], axis=-1)
    return out, list(zip(each, slots, strict=False))


def _selected(method: SelectionMethod, q, cache, context: AttentionContext, part: TileGroup, tokens, tiles):
    """Returns which slots of their tables queries read: [S, K, G*Q, P*B]."""
    batch, starts = context.batch, context.batch.block_starts[tiles]
    cache_positions, tables = batch.cache_positions[tokens], batch.block_tables[tiles]
    of_part = batch._replace(cache_positions=cache_positions, block_tables=tables, block_starts=starts)
    if method.by_token:
        chosen = chosen_positions(method, cache, context, Part(part, tokens, tiles))
        starts = slot_positions(starts, cache.block_size)
    else:
        _, chosen = select(method, q, cache, of_part, context.layer, part)  # [T, K, P']
        chosen = chosen.reshape(*part, *chosen.shape[1:])
    reads = (starts[:, None, None, :, None] == chosen[..., None, :]).any(-1)  # [S, Q, K, P]
    reads = reads if method.by_token else jnp.repeat(reads, cache.block_size, axis=-1)
    if batch.query_numbers is not None:
        reads |= (batch.query_numbers[tokens] <= 0).reshape(*part, 1, 1)
    return jnp.tile(jnp.moveaxis(reads, 1, 2), (1, 1, q.shape[1] // reads.shape[2], 1))
