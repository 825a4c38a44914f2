"""Paged attention: the contract, and the XLA reference against which all implementations are tested."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.patterns import FAR
from ksana_jax.models.alibi import biases
from ksana_jax.models.layers import soft_capped
from ksana_jax.models.rope import Rope
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.kv_write import CEILING, Queries, sink_query_position
from ksana_jax.ops.observation import ObservedQueries, Pieces, joined_masses, observed_mass
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.sources import Source, Tables, sources
from ksana_jax.ops.tiles import PADDING, Tiles
from ksana_jax.ops.transformed_pool import TransformedCache, as_stored

# Keys of a row, and queries of different rows, that are processed together: few enough for the processor's caches.
# On two CPU cores a decode step of 32 rows with up to 384 tokens (8 layers, bfloat16) took 38 ms with all rows at once,
# 30 ms in groups of 8, 26 ms in groups of 2; pieces of 64 to 128 tokens made no difference, of 256 it was 33 ms.
PIECE_TOKENS = 96
GROUP_QUERIES = 2


class Attended(NamedTuple):
    """The result of attention.

    out: [T, N, H] in float32 or the queries' dtype. Padding tokens (position -1) give zeros. Slots that no query sees
      may hold anything.
    masses: for each part of the step the attention weight [S, K, P*B] of each slot of its tiles' tables, summed over
      the tile's queries and the query heads of each kv head; empty if none are observed.
    """

    out: jax.Array
    masses: tuple[jax.Array, ...] = ()


def ragged_paged_attention(queries: Queries, cache: KVCache, context: AttentionContext, work: None = None) -> Attended:
    """Attends each packed token to the cached slots of its own row. XLA reference.

    Args:
      queries: of T packed tokens; N is a multiple of the cache's K.
      cache: keys and values of all layers, keys rotated at their text positions; this step's tokens are in it.
      work: result of `PagedAttention.schedule` for the step and the pattern; the reference needs none.

    Source: PagedAttention, arXiv:2309.06180, section 4; sinks seen from other positions, StreamingLLM
    (arXiv:2309.17453, section 3.2) and LM-Infinite (arXiv:2308.16137, section 4): keys stay rotated where they are
    and the query is rotated a second time, so that blocks never change.
    """
    batch, shape = context.batch, context.shape
    q, q_sink = queries
    observer = context.observer
    if q_sink is None and (observer is None or not (observer.unrotated_keys or observer.method.low_codec)):
        cache = as_stored(cache)  # no key is rotated by its position when it is read, or in another codec
    transformed = cache.transformed if isinstance(cache, TransformedCache) else None
    if transformed is not None:
        q = transformed.transform(q, jnp)
    of_tokens = q, q_sink, batch.cache_positions, batch.positions, batch.query_numbers, batch.ancestors
    parts, masses, of_layer = [], [], sources(cache, context)
    for part, tokens, tiles in shape.places():
        tiled = [None if x is None else x[tokens].reshape(*part, *x.shape[1:]) for x in of_tokens]
        by_head = batch.block_tables.ndim == 3
        found = [_attend_by_head(q[tokens], cache, context)] if by_head else []
        asked = [
            Tiles(
                *tiled[:-1],
                tables=source.tables.blocks[tiles],
                starts=source.tables.starts[tiles],
                ancestors=tiled[-1],
            )
            for source in (() if by_head else of_layer)
        ]
        for source, of_source in zip(of_layer, asked):
            found.append(PartialAttention(*_by_groups(_attend_group, of_source, source, context)))
            if shape.shared_rows and not parts:
                found.append(_attend_shared(q[tokens], source, context))
        seen = functools.reduce(merge, found)
        if context.sink_logits is not None:
            sinks = sinks_of(context, (*seen.top.shape, 1))[..., 0]
            seen = merge(seen, PartialAttention(sinks, jnp.ones_like(sinks), jnp.zeros_like(seen.out)))
        if observer is not None and observer.observes:
            log_total = (seen.top + jnp.log(seen.total)).reshape(*part, -1)
            each = [
                _by_groups(_observe_group, of_source._replace(log_total=log_total), source, context)
                for source, of_source in zip(of_layer, asked)
            ]
            starts = [of_source.starts for of_source in asked]
            masses.append(joined_masses(observer.method, each, starts, cache.block_size))
        parts.append(normalised(seen))
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return Attended(out if transformed is None else transformed.inverse(out, jnp), tuple(masses))


class PartialAttention(NamedTuple):
    """Attention of queries [T] to some of their keys, in float32, to be merged with other parts.

    top: [T, N] largest score, -inf where a query saw none. total: [T, N] sum of exp(score - top). out: [T, N, H] values
    weighted by exp(score - top).
    """

    top: jax.Array
    total: jax.Array
    out: jax.Array


def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Merges partial attention of the same queries to different keys (online softmax, arXiv:1805.02867, section 3)."""
    top = jnp.maximum(a.top, b.top)
    base = jnp.where(jnp.isfinite(top), top, 0.0)  # exp(-inf - 0) is 0 for queries that have seen nothing yet
    fade_a, fade_b = jnp.exp(a.top - base), jnp.exp(b.top - base)
    return PartialAttention(
        top, a.total * fade_a + b.total * fade_b, a.out * fade_a[..., None] + b.out * fade_b[..., None]
    )


def normalised(seen: PartialAttention) -> jax.Array:
    """Returns the softmax-weighted values [T, N, H]; zeros for queries that saw nothing."""
    return seen.out / jnp.where(seen.total > 0, seen.total, 1.0)[..., None]


def _attend_shared(q_TNH, source: Source, context: AttentionContext) -> PartialAttention:
    """Attends single tokens to the blocks that their groups share; a group is a tile of queries with one table."""
    batch, shape = context.batch, context.shape
    rows, groups, count = shape.shared_rows, shape.num_groups, shape.parts[0].count

    def tiled(x, fill):
        pad = ((0, groups * rows - len(x)), *((0, 0),) * (x.ndim - 1))
        return jnp.pad(x, pad, constant_values=fill).reshape(groups, rows, *x.shape[1:])

    positions = tiled(batch.cache_positions[:count], PADDING.positions)
    q_SQNH = tiled(q_TNH, PADDING.q)
    tiles = Tiles(q_SQNH, None, positions, None, None, source.shared.blocks, source.shared.starts)
    return PartialAttention(*(x[:count] for x in _by_groups(_attend_group, tiles, source, context)))


def _attend_by_head(q_TNH, cache: KVCache, context: AttentionContext) -> PartialAttention:
    """Attends single tokens whose kv heads have a table each, [T, K, P]: a kv head of a token becomes a tile."""
    batch, (t, heads, width) = context.batch, context.batch.block_tables.shape

    def read(ids):
        k, v = cache.read_heads(context.layer, ids // heads, ids % heads)
        return k[:, None], v[:, None]

    tables = (batch.block_tables * heads + jnp.arange(heads)[:, None]).reshape(-1, width)
    starts, positions = batch.block_starts.reshape(-1, width), jnp.repeat(batch.cache_positions, heads)[:, None]
    own = Tables(tables, starts)
    source = Source(1, cache.block_size, read, own, own, False, lambda newest: newest + 1)
    q = q_TNH.reshape(t * heads, 1, -1, q_TNH.shape[-1])
    seen = _by_groups(_attend_group, Tiles(q, None, positions, None, None, *own), source, context)
    return PartialAttention(*(x.reshape(t, -1, *x.shape[2:]) for x in seen))


def _by_groups(function: Callable, tiles: Tiles, source: Source, context: AttentionContext) -> Any:
    """Calls a function of S tiles, as `_attend_group`, with a few at a time, whose tables have similar lengths."""
    s, width = tiles.positions.shape
    group = max(GROUP_QUERIES // width, 1)
    if s <= group:
        return function(tiles, source, context)
    order = jnp.argsort(jnp.sum(tiles.starts < FAR, axis=1))

    def grouped(x, fill):
        x = jnp.pad(x[order], ((0, -s % group), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
        return x.reshape(-1, group, *x.shape[1:])

    groups = Tiles(*(None if x is None else grouped(x, fill) for x, fill in zip(tiles, PADDING, strict=True)))
    found = jax.lax.map(lambda tiles: function(tiles, source, context), groups)
    back = jnp.argsort(order)

    def in_order(x):  # of tiles, or of their tokens
        each = x.shape[1] // group
        return x.reshape(-1, each, *x.shape[2:])[back].reshape(s * each, *x.shape[2:])

    return jax.tree.map(in_order, found)


class KeyPieces(NamedTuple):
    """Keys and values of some tiles, a piece of their block tables at a time.

    tiles: with tables of whole pieces. read: piece -> see `read_keys`. count: of pieces with visible keys, found on the
    device: time follows the text, not the width P that the step was compiled for. most: of all. size: in blocks.
    """

    tiles: Tiles
    read: Callable[[Any], tuple[Any, Any, Any, Any]]
    count: Any
    most: int
    size: int

    @classmethod
    def of(cls, tiles: Tiles, source: Source, context: AttentionContext) -> KeyPieces:
        piece = max(PIECE_TOKENS // source.block_size, 1)
        pad = ((0, 0), (0, -tiles.tables.shape[1] % piece))
        tiles = tiles._replace(
            tables=jnp.pad(tiles.tables, (*pad, *((0, 0),) * (tiles.tables.ndim - 2))),
            starts=jnp.pad(tiles.starts, pad, constant_values=PADDING.starts),
        )

        def read(i):
            tables, starts = (
                jax.lax.dynamic_slice_in_dim(x, i * piece, piece, axis=1) for x in (tiles.tables, tiles.starts)
            )
            return read_keys(tiles, tables, starts, source, context)

        # Blocks after those that a tile reads come last.
        is_read = tiles.starts < tiles.slots_end(source.end)[:, None]
        last = jnp.max(jnp.where(is_read, 1 + jnp.arange(is_read.shape[1]), 0))
        return cls(tiles, read, -(-last // piece), is_read.shape[1] // piece, piece)


def _attend_group(tiles: Tiles, source: Source, context: AttentionContext) -> PartialAttention:
    """Attends S*Q tokens to one piece of their block tables at a time, with an online softmax.

    Source: online softmax, arXiv:2205.14135, algorithm 1.
    """
    width, kv_heads, pieces = tiles.positions.shape[1], source.num_kv_heads, KeyPieces.of(tiles, source, context)
    tiles, q_SKRH = pieces.tiles, by_kv_head(tiles.q, kv_heads)
    state = PartialAttention(
        jnp.full(q_SKRH.shape[:3], -jnp.inf, jnp.float32),
        jnp.zeros(q_SKRH.shape[:3], jnp.float32),
        jnp.zeros(q_SKRH.shape, jnp.float32),
    )
    if tiles.q_sink is not None:
        state = _absorb_sinks(state, by_kv_head(tiles.q_sink, kv_heads), tiles, source, context)

    def absorb(read, i, state):
        k, v, slot_pos, hidden = read(i)
        return _absorb(state, q_SKRH, k, v, slot_pos, hidden, tiles, source, context)

    if source.low is not None:
        ends = tiles.slots_end(source.end)
        num_low, read_low = source.low.pieces(tiles.tables, tiles.starts, ends, source.block_size, pieces.size)
        state = context.features.loop(num_low, pieces.most, functools.partial(absorb, read_low), state)
    # Later pieces have no visible key, and leave the softmax as it is.
    state = context.features.loop(pieces.count, pieces.most, functools.partial(absorb, pieces.read), state)
    return PartialAttention(*(by_token(x, width) for x in state))


def _observe_group(tiles: Tiles, source: Source, context: AttentionContext) -> jax.Array:
    """Returns the weights [S, K, P*B], or [S, X, K, P*B], that S*Q tokens give to the slots of their tables."""
    observer, kv_heads, pieces = context.observer, source.num_kv_heads, KeyPieces.of(tiles, source, context)
    assert observer is not None
    q_SKRH = by_kv_head(tiles.q, kv_heads)

    def scores_of(i):
        k, _, kv_pos, hidden = pieces.read(i)
        k = k.astype(_wide_enough(k.dtype, q_SKRH.dtype))
        return masked_scores(q_SKRH, k, kv_pos, hidden, pieces.tiles, source, context), kv_pos

    log_total = by_kv_head(tiles.log_total[..., None], kv_heads)[..., 0]
    queries = ObservedQueries(tiles.text_positions, tiles.numbers, log_total)
    loops = Pieces(pieces.count, pieces.most, pieces.size * source.block_size, context.features)
    num_slots = tiles.tables.shape[1] * source.block_size
    return observed_mass(observer, queries, scores_of, loops)[..., :num_slots]


def by_kv_head(x, kv_heads: int):
    """[S, Q, N, H] -> [S, K, G*Q, H]: heads that share keys become rows of one matrix."""
    s, width, n, _ = x.shape
    x = x.reshape(s, width, kv_heads, n // kv_heads, -1).transpose(0, 2, 3, 1, 4)
    return x.reshape(s, kv_heads, -1, x.shape[-1])


def by_token(x, width: int):
    """[S, K, G*Q, ...] -> [S*Q, N, ...]."""
    s, kv_heads, rows, *others = x.shape
    x = x.reshape(s, kv_heads, rows // width, width, *others)
    return jnp.moveaxis(x, 3, 1).reshape(s * width, -1, *others)


def _wide_enough(stored, queries):
    """Returns a type that holds stored numbers and queries. jax does not promote floats of 8 bits, which all hold."""
    return queries if jnp.dtype(stored).itemsize == 1 else jnp.promote_types(stored, queries)


def sinks_of(context: AttentionContext, shape: tuple[int, ...]):
    """The learned sink logits of the heads for arrays [..., N, 1] of queries, in float32."""
    assert context.sink_logits is not None
    return jnp.broadcast_to(context.sink_logits.astype(jnp.float32)[:, None], shape)


def _rotated(k_SKCH, positions_SC, rope: Rope):
    """Rotates keys that were stored unrotated."""
    return jnp.moveaxis(rope.rotate(jnp.moveaxis(k_SKCH, 1, 2), rope.angles(positions_SC)), 2, 1)


def slot_positions(starts_SP, block_size: int):
    """Cache positions [S, P*B] of the slots of blocks."""
    return (starts_SP[:, :, None] + jnp.arange(block_size)).reshape(len(starts_SP), -1)


def read_keys(tiles: Tiles, tables, starts, source: Source, context: AttentionContext):
    """Returns keys, rotated, and values [S, K, P*B, H] of blocks, the positions [S, P*B] of their slots, and which are
    hidden [S, K, P*B], None if none are."""
    k, v = source.read(tables)
    slot_pos = slot_positions(starts, source.block_size)
    hidden = None if source.hidden is None else source.hidden(tables)
    k = _rotated(k, tiles.key_positions(slot_pos), context.rope) if source.unrotated_keys else k
    return k, v, slot_pos, hidden


def _absorb_sinks(
    state: PartialAttention, q_sink_SKRH, tiles: Tiles, source: Source, context: AttentionContext
) -> PartialAttention:
    """Adds the repositioned sinks, which are in the first blocks of a table."""
    first = slice(-(-context.num_repositioned_sinks // source.block_size))
    k, v, slot_pos_SC, hidden_SKC = read_keys(tiles, tiles.tables[:, first], tiles.starts[:, first], source, context)
    k = sink_keys(k, slot_pos_SC, tiles, context)
    return _absorb(state, q_sink_SKRH, k, v, slot_pos_SC, hidden_SKC, tiles, source, context, sinks=True)


def sink_keys(k_SKCH, slot_pos_SC, tiles: Tiles, context: AttentionContext):
    """Returns keys as the queries for repositioned sinks, `Tiles.q_sink`, read them."""
    rope = context.rope
    # "ceiling" needs one distance for all sinks: their keys are rotated back to position 0.
    back = jnp.where(context.pattern.sink_position == CEILING, -tiles.key_positions(slot_pos_SC), 0)
    return jnp.moveaxis(rope.rotate_further(jnp.moveaxis(k_SKCH, 1, 2), rope.angles(back)), 2, 1)


def _absorb(
    state: PartialAttention,
    q_SKRH,
    k_SKCH,
    v_SKCH,
    slot_pos_SC,
    hidden_SKC,
    tiles: Tiles,
    source: Source,
    context: AttentionContext,
    sinks: bool = False,
) -> PartialAttention:
    """Adds the visible keys, or only the repositioned ones, to the online softmax."""
    # Queries are not rounded to the type of stored keys: a pool may be narrower than the engine's dtype, or wider.
    k_SKCH, v_SKCH = (x.astype(_wide_enough(x.dtype, q_SKRH.dtype)) for x in (k_SKCH, v_SKCH))
    # Slots beyond a tile's newest token may hold another row's values; a weight of 0 does not silence a NaN there.
    end_S = tiles.slots_end(source.end)
    read_SKC = (slot_pos_SC < end_S[:, None])[:, None]
    if source.low is not None and hidden_SKC is not None:
        read_SKC &= ~hidden_SKC  # bits of other codecs are any numbers
    v_SKCH = jnp.where(read_SKC[..., None], v_SKCH, 0)
    top, total, out = state
    scores = masked_scores(q_SKRH, k_SKCH, slot_pos_SC, hidden_SKC, tiles, source, context, sinks)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    # exp(-inf - 0) is 0 for queries that have seen nothing yet.
    base = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
    weights = jnp.exp(scores - base[..., None])
    fade = jnp.exp(top - base)
    more = jnp.einsum("SKRC,SKCH->SKRH", weights.astype(v_SKCH.dtype), v_SKCH, preferred_element_type=jnp.float32)
    return PartialAttention(new_top, total * fade + weights.sum(axis=-1), out * fade[..., None] + more)


def masked_scores(
    q_SKRH, k_SKCH, slot_pos_SC, hidden_SKC, tiles: Tiles, source: Source, context: AttentionContext, sinks=False
):
    """Returns scores [S, K, R, C] in float32; -inf for keys that are not visible, or not repositioned sinks."""
    q_pos, kv_pos = tiles.positions[:, :, None], tiles.key_positions(slot_pos_SC)[:, None, :]
    chosen_SQC = context.pattern.visible(q_pos, kv_pos)
    if tiles.ancestors is not None:
        chosen_SQC &= tiles.on_the_way(slot_pos_SC)
    if source.has is not None:
        chosen_SQC &= source.has(q_pos, kv_pos)
    if tiles.q_sink is not None:
        repositioned = context.pattern.repositioned(q_pos, kv_pos)
        chosen_SQC &= repositioned if sinks else ~repositioned
    group = q_SKRH.shape[2] // chosen_SQC.shape[1]
    chosen_SKRC = jnp.tile(chosen_SQC, (1, group, 1))[:, None]
    if hidden_SKC is not None:
        chosen_SKRC &= ~hidden_SKC[:, :, None]
    scores = jnp.einsum("SKRH,SKCH->SKRC", q_SKRH.astype(k_SKCH.dtype), k_SKCH, preferred_element_type=jnp.float32)
    if context.alibi is not None:
        if sinks:  # from the position at which queries look at sink 0; with "ceiling", its key counts as there
            at_ceiling = context.pattern.sink_position == CEILING
            kv_pos, q_pos = jnp.where(at_ceiling, 0, kv_pos), sink_query_position(context.pattern, q_pos, 0)
        scores += biases(context.alibi, q_pos, kv_pos, scores.shape[1]).reshape(scores.shape)
    scores = scores if context.soft_cap is None else soft_capped(scores, context.soft_cap)
    return jnp.where(chosen_SKRC, scores, -jnp.inf)
