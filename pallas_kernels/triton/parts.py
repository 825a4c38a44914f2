"""What the Pallas-Triton kernels of attention share: their loop over keys and values, and the arrays that it reads.

jax has deprecated its Triton back end: the day it goes, this folder goes.

Source: online softmax, FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.patterns import Pattern
from pallas_kernels.work import MASK, MOVED, TILE_KV, plan, unit_tokens

LOG2E = math.log2(math.e)
NUM_NUMBERS = len(Pattern._fields) + 1


class Shape(NamedTuple):
    """What a kernel is compiled for. rows, columns: of its matrices, powers of two that hold [Q * G, H]."""

    q_tile: int
    group: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sink_queries: int
    soft_cap: float | None

    @property
    def rows(self) -> int:
        return max(16, pl.next_power_of_2(self.q_tile * self.group))

    @property
    def columns(self) -> int:
        return pl.next_power_of_2(self.head_dim)

    @property
    def size(self) -> int:
        """Tokens of a unit."""
        return unit_tokens(self.block_size)


def narrow(q, tables, starts, positions, q_sink, pool, max_rows: int):
    """Cuts tiles of more matrix rows than `max_rows`, or than the registers hold, into several with the same table."""
    num_tiles, q_tile, num_heads, head_dim = q.shape
    if q_sink is not None:
        max_rows = 16 if head_dim > 128 else 32
    elif head_dim > 128:
        max_rows = min(max_rows, 64)
    group = num_heads // pool.shape[3]
    if group > max_rows:
        raise NotImplementedError(f"{group} query heads share a kv head; these kernels take {max_rows} at most")
    narrow_q = max(n for n in range(1, q_tile + 1) if q_tile % n == 0 and n * group <= max_rows)
    parts = q_tile // narrow_q
    if parts > 1:
        tables, starts = jnp.repeat(tables, parts, axis=0), jnp.repeat(starts, parts, axis=0)
        shape = (num_tiles * parts, narrow_q)
        q, positions = q.reshape(*shape, *q.shape[2:]), positions.reshape(shape)
        q_sink = None if q_sink is None else q_sink.reshape(*shape, *q_sink.shape[2:])
    return q, tables, starts, positions, q_sink


def shape_of(q, pool, q_sink, soft_cap) -> Shape:
    """What the kernels are compiled for; raises NotImplementedError where there is none for these arguments."""
    _, q_tile, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3:5]
    if q.dtype != pool.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"queries in {q.dtype}, pool in {pool.dtype}; both must be bfloat16 or float16")
    if head_dim not in (64, 96, 128, 256):
        raise NotImplementedError(f"head_dim {head_dim}; these kernels take 64, 96, 128 or 256")
    unit_tokens(block_size)
    sink_queries = 0 if q_sink is None else q_sink.shape[2]
    return Shape(q_tile, num_heads // num_kv_heads, num_kv_heads, head_dim, block_size, sink_queries, soft_cap)


def plan_work(tables, starts, positions, pattern: Pattern, pool, num_workers: int):
    """`work.plan` for the layout of this pool."""
    _, num_layers, two, num_kv_heads, block_size, _ = pool.shape
    return plan(
        tables,
        starts,
        positions,
        pattern,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        units_per_block_id=num_layers * two * num_kv_heads * (block_size // unit_tokens(block_size)),
        num_workers=num_workers,
    )


def inputs(q, pool, positions, pattern: Pattern, layer, q_sink, work) -> tuple:
    """Arrays that `attend` reads, in its order. Of the pool only a view is made: [rows, H]."""
    numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (*pattern, layer)])
    sinks = jnp.zeros((1, 1, 1, 1, 1), q.dtype) if q_sink is None else q_sink
    pool = pool.reshape(-1, pool.shape[-1])
    num_moved = (work.care & MOVED != 0).sum(axis=1).astype(jnp.int32)
    return q, sinks, pool, positions, work.units, work.starts, work.care, work.newest, num_moved, numbers


def sinks_of(sink_logits, num_heads: int):
    """[N] learned sink logits; -inf where there are none."""
    return jnp.full(num_heads, -jnp.inf, jnp.float32) if sink_logits is None else sink_logits.astype(jnp.float32)


def parameters(name: str, shape: Shape, num_warps: int | None, num_stages: int | None, interpret: bool) -> dict:
    """Keywords of `pallas_call`. The back end is always named: which one is the default depends on jax's version.

    Compiled for H200 and A100 these defaults spill no registers, and the stages fit the shared memory.
    """
    if num_warps is None:
        # Each of these makes a program need more registers; two of them are too much for 4 warps.
        sinks = shape.sink_queries > 1 or (shape.sink_queries > 0 and shape.columns > 64)
        needs = (shape.rows > 16) + (shape.rows > 64) + (shape.columns > 128) + sinks
        num_warps = 8 if needs >= 2 else 4
    if num_stages is None:
        num_stages = 3 if shape.columns <= 128 else 2
    if not interpret:
        # jax says it once per kernel when it is lowered, which is after we have returned.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    return dict(
        name=name, interpret=interpret, compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    )


def attend(q_ref, sink_ref, pool_ref, pos_ref, units_ref, starts_ref, care_ref, newest_ref, num_moved_ref, numbers_ref,
           tile, head, first_piece, num_pieces, *, shape: Shape):  # fmt: skip
    """Attention of one query tile and kv head over some of its pieces, inside a kernel.

    Returns:
      weighted sum of values [rows, columns], largest score in base 2 and sum of weights [rows]; all float32.
    """
    pattern = Pattern(*(numbers_ref[i] for i in range(NUM_NUMBERS - 1)))
    layer = numbers_ref[NUM_NUMBERS - 1]
    size, per_piece = shape.size, TILE_KV // shape.size
    q_row, q_column, q_head, q_mask = matrix_places(shape, head)
    q_token = q_row // shape.group
    q = plt.load(q_ref.at[tile, q_token, q_head, q_column], mask=q_mask, other=0.0)
    q_pos = _positions(pos_ref, tile, shape)
    newest = newest_ref[tile]
    slot = jnp.arange(TILE_KV, dtype=jnp.int32)
    kv_column = _along(jnp.arange(shape.columns, dtype=jnp.int32), 1, TILE_KV)
    parts = shape.block_size // size
    # Units between a block's first and this head's keys, and from there to its values.
    keys = (layer * 2 * shape.num_kv_heads + head) * parts
    values = shape.num_kv_heads * parts

    def places(piece):
        """Row of the pool [rows, H] of each slot's key, without layer and head, and text position."""
        index = jnp.minimum(piece * per_piece + slot // size, units_ref.shape[1] - 1)
        row = plt.load(units_ref.at[tile, index]) * size + slot % size
        return row, plt.load(starts_ref.at[tile, index]) + slot % size

    def body(i, carry, with_sinks=False):
        acc, top, total, row, kv_pos = carry
        piece = first_piece + i
        # The next piece's, one turn early: loads whose addresses come from loads of the same turn are not asked for
        # `num_stages` pieces ahead but for half as many.
        following = places(piece + 1)
        row = row + keys * size
        # A weight of 0 does not silence a NaN in a slot that nobody has written.
        mask = _along(kv_pos <= newest, 0, shape.columns)
        if shape.columns != shape.head_dim:
            mask &= kv_column < shape.head_dim
        k = plt.load(pool_ref.at[_along(row, 0, shape.columns), kv_column], mask=mask, other=0.0)
        v_row = _along(row + values * size, 0, shape.columns)
        v = plt.load(pool_ref.at[v_row, kv_column], mask=mask, other=0.0)
        scores = _dot_t(q, k)
        care = care_ref[tile, piece]
        kv_pos = _along(kv_pos, 1, shape.rows)
        if with_sinks:
            here = pattern.moved(_along(q_pos, 0, TILE_KV), kv_pos)

            def move(j, scores):
                q_sink = plt.load(sink_ref.at[tile, q_token, j, q_head, q_column], mask=q_mask, other=0.0)
                mine = here & (jnp.minimum(kv_pos, shape.sink_queries - 1) == j)
                return jnp.where(mine, _dot_t(q_sink, k), scores)

            scores = lax.fori_loop(0, shape.sink_queries, move, scores)
        if shape.soft_cap is None:
            scores = scores * LOG2E
        else:
            scores = jnp.tanh(scores * (1 / shape.soft_cap)) * (shape.soft_cap * LOG2E)

        def masked(scores):
            return jnp.where(pattern.visible(_along(q_pos, 0, TILE_KV), kv_pos), scores, -jnp.inf)

        scores = lax.cond(care & MASK != 0, masked, lambda scores: scores, scores)
        new_top = jnp.maximum(top, scores.max(axis=1))
        # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        fade = jnp.exp2(top - base)
        weights = jnp.exp2(scores - base[:, None])
        acc = acc * fade[:, None] + _dot(weights.astype(v.dtype), v)
        return acc, new_top, total * fade + weights.sum(axis=1), *following

    carry = (
        jnp.zeros((shape.rows, shape.columns), jnp.float32),
        jnp.full(shape.rows, -jnp.inf, jnp.float32),
        jnp.zeros(shape.rows, jnp.float32),
        *places(first_piece),
    )
    begin = 0
    if shape.sink_queries:
        # Sinks are in the first pieces. Their loop is one of its own as the others' would not be pipelined with it.
        begin = jnp.clip(num_moved_ref[tile] - first_piece, 0, num_pieces)
        carry = lax.fori_loop(0, begin, functools.partial(body, with_sinks=True), carry)
    return lax.fori_loop(begin, num_pieces, body, carry)[:3]


def store_result(out_ref, lse_ref, logits_ref, pos_ref, tile, head, acc, top, total, shape: Shape):
    """Stores a tile's final result of one kv head: [S, Q, N, H] and its natural log-sum-exp [S, Q, N]."""
    row, column, q_head, mask = matrix_places(shape, head)
    nothing = (total == 0.0) | (_positions(pos_ref, tile, shape) < 0)
    # A learned sink is one more logit, without a value.
    row_1d = jnp.arange(shape.rows, dtype=jnp.int32)
    inside = row_1d < shape.q_tile * shape.group
    head_1d = head * shape.group + row_1d % shape.group
    logit = plt.load(logits_ref.at[head_1d], mask=inside, other=0.0) * LOG2E
    new_top = jnp.maximum(top, logit)
    base = jnp.where(nothing, 0.0, new_top)
    fade = jnp.where(nothing, 0.0, jnp.exp2(top - base))
    total = jnp.where(nothing, 1.0, total * fade + jnp.exp2(logit - base))
    out = (acc * (fade / total)[:, None]).astype(out_ref.dtype)
    plt.store(out_ref.at[tile, row // shape.group, q_head, column], out, mask=mask)
    lse = jnp.where(nothing, -jnp.inf, (base + jnp.log2(total)) * (1 / LOG2E))
    plt.store(lse_ref.at[tile, row_1d // shape.group, head_1d], lse, mask=inside)


def matrix_places(shape: Shape, head):
    """Row, column, query head and whether there is one, of each element of a matrix [rows, columns]."""
    row = _along(jnp.arange(shape.rows, dtype=jnp.int32), 0, shape.columns)
    column = _along(jnp.arange(shape.columns, dtype=jnp.int32), 1, shape.rows)
    mask = (row < shape.q_tile * shape.group) & (column < shape.head_dim)
    return row, column, head * shape.group + row % shape.group, mask


def _positions(pos_ref, tile, shape: Shape):
    """[rows] text positions of the queries; -1 where there is none."""
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    return plt.load(pos_ref.at[tile, row // shape.group], mask=row < shape.q_tile * shape.group, other=-1)


def _along(x, axis: int, width: int):
    """A vector along one axis of a matrix, repeated `width` times along the other."""
    shape = (x.shape[0], width) if axis == 0 else (width, x.shape[0])
    return lax.broadcast_in_dim(x, shape, (axis,))


def _dot(a, b):
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_t(a, b):
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
