"""Selection in one layer of a step: summaries of the blocks it writes to, and tables of the blocks, or of the tokens,
that queries read. Knows positions and blocks; not how blocks are scored."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.ops.attention import Attended
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.implementations import PagedAttention
from ksana_jax.ops.indexing import Part, attend_chosen
from ksana_jax.ops.kv_write import Queries
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import StepShape, TileGroup


def summarise(method: SelectionMethod, cache: KVCache, context: AttentionContext) -> KVCache:
    """Returns the pool with summaries of the blocks in which this step has stored keys.

    They follow from the stored keys up to the newest, not from what they were before: a block that is reused, or in
    which keys are written again, keeps no trace.
    """
    slots, size = context.batch.slots, cache.block_size
    blocks, absent = slots // size, cache.num_blocks
    # Tokens of a block are adjacent in a step; the last of them is the newest.
    newest = (blocks != jnp.append(blocks[1:], -1)) & (blocks < absent)
    most = sum(part.count * min(part.width, (part.width + size - 2) // size + 1) for part in context.shape.parts)
    [at] = jnp.nonzero(newest, size=most, fill_value=len(slots))
    ids = blocks.at[at].get(mode="fill", fill_value=absent)
    last = slots.at[at].get(mode="fill", fill_value=0) % size
    keys, _ = cache.read(context.layer, ids[:, None])
    used = jnp.arange(size) <= last[:, None]
    summaries = method.summarise(keys.astype(jnp.float32), used, jnp)
    # Without this, nothing says that keys are read before the next layer writes its own, and XLA copies the pool.
    summaries, kv = jax.lax.optimization_barrier((summaries, cache.kv))
    return cache.with_kv(kv).with_summaries(context.layer, ids, summaries)


def attend_selected(
    method: SelectionMethod, attention: PagedAttention, queries: Queries, cache: KVCache, context: AttentionContext
) -> Attended:
    """Attends the queries of a layer to what they select, blocks or tokens; arguments as `PagedAttention.attend` has
    them.

    Queries whose number is 0, such as a prompt's, read all of their blocks.
    """
    if context.batch.block_tables.shape[-1] <= method.num_blocks(cache.block_size):
        return attention.attend(queries, cache, context, None)
    parts = [_attend_part(method, attention, queries, cache, context, *place) for place in context.shape.places()]
    return Attended(parts[0] if len(parts) == 1 else jnp.concatenate(parts))


def _attend_part(method, attention, queries: Queries, cache, context: AttentionContext, part: TileGroup, tokens, tiles):
    """Attends the tokens of one part of a step: [count * width, N, H]."""
    batch, num_tokens = context.batch, part.count * part.width
    q, tables, starts = queries.q[tokens], batch.block_tables[tiles], batch.block_starts[tiles]
    of_part = batch._replace(
        positions=batch.positions[tokens],
        cache_positions=batch.cache_positions[tokens],
        block_tables=tables,
        block_starts=starts,
        query_numbers=None,
    )

    def attend(part: TileGroup, batch):
        shape = StepShape((part,), batch.block_tables.shape[-1], num_tokens)
        where = context._replace(batch=batch, shape=shape, num_repositioned_sinks=0)
        return attention.attend(Queries(q, None), cache, where, None).out

    def selected():
        if method.by_token:
            return attend_chosen(method, attention, q, cache, context, Part(part, tokens, tiles))
        found = select(method, q, cache, of_part, context.layer, part)
        return attend(TileGroup(num_tokens, 1), of_part._replace(block_tables=found[0], block_starts=found[1]))

    if batch.query_numbers is None:
        return selected()
    selects = batch.query_numbers[tokens] > 0
    chosen = _where_any(selects, selected)
    whole = _where_any(~selects & (of_part.positions >= 0), functools.partial(attend, part, of_part))
    return jnp.where(selects[:, None, None], chosen, whole)


def _where_any(needed: jax.Array, compute: Any) -> jax.Array:
    """Returns compute(), or zeros if no query needs it."""
    shape = jax.eval_shape(compute)
    return jax.lax.cond(jnp.any(needed), compute, lambda: jnp.zeros(shape.shape, shape.dtype))


def select(method: SelectionMethod, q: jax.Array, cache: KVCache, batch: Any, layer: Any, part: TileGroup):
    """Returns the blocks that the queries q [T, N, H] of a part read in each kv head, and their starts: [T, K, P'], by
    rising position."""
    tables, starts = batch.block_tables, batch.block_starts
    heads, size = cache.kv.shape[3], cache.block_size
    summaries = cache.summaries(layer, tables)
    asked = q.reshape(*part, heads, -1, q.shape[-1]).astype(jnp.float32)
    position = batch.cache_positions.reshape(*part, 1, 1)
    begin = starts[:, None, None, :]
    whole = begin <= position - size
    scores = method.scores(asked, summaries, whole, jnp)
    always = (begin == 0) | ~whole
    scores = jnp.where(begin > position, -jnp.inf, jnp.where(always, jnp.inf, scores))
    _, at = jax.lax.top_k(scores, method.num_blocks(size))
    # In the order of the text, in which a query that reads all of its blocks reads them.
    at = jnp.sort(at, axis=-1).reshape(part.count, -1)
    chosen = (jnp.take_along_axis(x, at, axis=1).reshape(len(q), heads, -1) for x in (tables, starts))
    return tuple(chosen)
