"""Shared parts of the Pallas-Triton attention kernels: the loop over keys and values, and the arrays that it reads.

jax has deprecated its Triton back end: this folder will go with it.

Source: online softmax, FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import warnings
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels import work
from pallas_kernels.contract import Call, Result, check_options
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import MASK, REPOSITIONED, TILE_KV, split_tiles, unit_tokens

LOG2E = math.log2(math.e)
NUM_NUMBERS = len(Pattern._fields) + 1


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a kernel runs.

    num_workers: for decode, equal stretches that the work is cut into, a few times the multiprocessors. One more
      program runs for each (query tile, kv head) pair.
    num_warps, num_stages: of each program.
    interpret: run it with jax operations on any device.
    """

    num_workers: int = 512
    num_warps: int | None = None
    num_stages: int | None = None
    interpret: bool = False


class Shape(NamedTuple):
    """The shape that a kernel is compiled for. rows, columns: of its matrices, powers of two that hold [Q * G, H]."""

    q_tile: int
    group: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sink_queries: int
    soft_cap: float | None
    rotates: bool = False

    @property
    def rows(self) -> int:
        return max(16, pl.next_power_of_2(self.q_tile * self.group))

    @property
    def columns(self) -> int:
        return pl.next_power_of_2(self.head_dim)

    @property
    def key_parts(self) -> tuple[tuple[int, int], ...]:
        """First column and width of the parts of a key: its halves if they are rotated, else all of it."""
        half = self.head_dim // 2
        return ((0, half), (half, half)) if self.rotates else ((0, self.head_dim),)

    @property
    def size(self) -> int:
        """Tokens of a unit."""
        return unit_tokens(self.block_size)


def narrow(call: Call, max_rows: int) -> Call:
    """Cuts tiles of more matrix rows than `max_rows`, or than the registers hold, into several with the same table.

    Raises:
      NotImplementedError: an option, dtype, head dim, block size or group that these kernels do not support.
    """
    check_options(call, "q_sink", "sinks", "soft_cap", "return_lse", "out_dtype", "key_rope")
    q, q_sink, pool = call.q, call.options.q_sink, call.pool.kv
    num_tiles, q_tile, _, head_dim = q.shape
    if q.dtype != pool.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"queries in {q.dtype}, pool in {pool.dtype}; both must be bfloat16 or float16")
    if head_dim not in (64, 96, 128, 256):
        raise NotImplementedError(f"head_dim {head_dim}; these kernels take 64, 96, 128 or 256")
    unit_tokens(pool.shape[4])
    if q_sink is not None and call.options.key_rope is not None:
        raise NotImplementedError("key_rope with q_sink; these kernels take one of them")
    if q_sink is not None:
        max_rows = 16 if head_dim > 128 else 32
    elif head_dim > 128:
        max_rows = min(max_rows, 64)
    if call.options.key_rope is not None:
        max_rows = min(max_rows, 32)
    if call.group > max_rows:
        raise NotImplementedError(f"{call.group} query heads share a kv head; these kernels take {max_rows} at most")
    narrow_q = max(n for n in range(1, q_tile + 1) if q_tile % n == 0 and n * call.group <= max_rows)
    tables, starts, positions = split_tiles(call.tables, call.starts, call.positions, narrow_q)
    shape = (num_tiles * (q_tile // narrow_q), narrow_q)
    q_sink = None if q_sink is None else q_sink.reshape(*shape, *q_sink.shape[2:])
    return call.replace(
        q=q.reshape(*shape, *q.shape[2:]), tables=tables, starts=starts, positions=positions, q_sink=q_sink
    )


def shape_of(call: Call) -> Shape:
    """The shape that the kernels are compiled for."""
    num_kv_heads, block_size, head_dim = call.pool.kv.shape[3:]
    q_tile = call.q.shape[1]
    rotates = call.options.key_rope is not None
    sizes = q_tile, call.group, num_kv_heads, head_dim, block_size, call.num_sink_queries
    return Shape(*sizes, call.options.soft_cap, rotates)


def schedule(call: Call, num_workers: int) -> work.Work:
    """`work.schedule` of a call."""
    shape = call.pool.kv.shape
    return work.schedule(
        call.tables,
        call.starts,
        call.positions,
        call.effective_pattern,
        block_size=shape[4],
        num_kv_heads=shape[3],
        per_block_id=work.units_per_block_id(shape),
        num_workers=num_workers,
    )


class Inputs(NamedTuple):
    """Inputs of `attend`: arrays, or inside a kernel references to them.

    pool: a view [rows, H]. num_repositioned: [S] pieces with repositioned sinks. numbers: of the pattern, then the
    layer. q_sink, rope: placeholders if no sinks are repositioned, or no keys rotated. Others as in Call and Work.
    """

    q: Any
    q_sink: Any
    pool: Any
    positions: Any
    units: Any
    starts: Any
    care: Any
    newest: Any
    num_repositioned: Any
    numbers: Any
    rope: Any

    @classmethod
    def of(cls, call: Call, work: work.Work) -> Inputs:
        numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (*call.effective_pattern, call.layer)])
        q_sink = jnp.zeros((1, 1, 1, 1, 1), call.q.dtype) if call.options.q_sink is None else call.options.q_sink
        pool = call.pool.kv.reshape(-1, call.pool.kv.shape[-1])
        num_repositioned = (work.care & REPOSITIONED != 0).sum(axis=1).astype(jnp.int32)
        return cls(
            call.q,
            q_sink,
            pool,
            call.positions,
            work.units,
            work.starts,
            work.care,
            work.newest,
            num_repositioned,
            numbers,
            call.options.key_rope or (jnp.zeros((1, 1)),) * 2,
        )


def sinks_of(call: Call):
    """[N] learned sink logits; -inf without any."""
    sinks = call.options.sinks
    return jnp.full(call.q.shape[2], -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)


def result_of(call: Call, out, lse) -> Result:
    """The result of a call, from a kernel's output for the narrowed call."""
    out = out.reshape(call.q.shape)
    return Result(out, lse.reshape(call.q.shape[:3]) if call.options.return_lse else None)


def outputs(call: Call):
    """Types of a result and its log-sum-exp."""
    return jax.ShapeDtypeStruct(call.q.shape, call.out_dtype), jax.ShapeDtypeStruct(call.q.shape[:3], jnp.float32)


def parameters(name: str, shape: Shape, tuning: Tuning) -> dict:
    """Keywords of `pallas_call`. The back end is always named: which one is the default depends on jax's version.

    Compiled for H200 and A100 these defaults spill no registers, and the stages fit the shared memory.
    """
    num_warps, num_stages = tuning.num_warps, tuning.num_stages
    if num_warps is None:
        # Each of these makes a program need more registers; two of them are too much for 4 warps.
        sinks = shape.sink_queries > 1 or (shape.sink_queries > 0 and shape.columns > 64)
        needs = (shape.rows > 16) + (shape.rows > 64) + (shape.columns > 128) + sinks + shape.rotates
        num_warps = 8 if needs >= 2 else 4
    if num_stages is None:
        num_stages = 3 if shape.columns <= 128 and not shape.rotates else 2
    if not tuning.interpret:
        # jax says it once per kernel when it is lowered, which is after we have returned.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    params = plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return dict(name=name, interpret=tuning.interpret, compiler_params=params)


def attend(refs: Inputs, tile, head, first_piece, num_pieces, *, shape: Shape):
    """Attention of one query tile and kv head over some of its pieces, inside a kernel.

    Returns:
      weighted sum of values [rows, columns], largest score in base 2 and sum of weights [rows]; all float32.
    """
    *numbers, layer = (refs.numbers[i] for i in range(NUM_NUMBERS))
    pattern = Pattern(*numbers)
    q = tuple(_queries(refs.q, tile, head, first, width, shape) for first, width in shape.key_parts)
    q_pos = _positions(refs.positions, tile, shape)
    load_piece = _piece_loader(refs, shape, layer, head, refs.newest[tile])
    places = functools.partial(_places, refs, shape, tile)

    def body(i, carry, with_sinks=False):
        acc, top, total, row, kv_pos = carry
        piece = first_piece + i
        # The next piece's, one turn early: loads whose addresses come from loads of the same turn are requested
        # not `num_stages` pieces ahead but half as many.
        following = places(piece + 1)
        k, v = load_piece(row, kv_pos)
        scores = functools.reduce(operator.add, map(_dot_t, q, k))
        care = refs.care[tile, piece]
        kv_pos = _along(kv_pos, 1, shape.rows)
        if with_sinks:
            here = pattern.repositioned(_along(q_pos, 0, TILE_KV), kv_pos)
            scores = _with_sinks(refs, shape, tile, head, here, kv_pos, k[0], scores)
        scores = _capped(scores, shape.soft_cap)

        def masked(scores):
            return jnp.where(pattern.visible(_along(q_pos, 0, TILE_KV), kv_pos), scores, -jnp.inf)

        scores = lax.cond(care & MASK != 0, masked, lambda scores: scores, scores)
        return *_absorb(acc, top, total, scores, v), *following

    carry = (
        jnp.zeros((shape.rows, shape.columns), jnp.float32),
        jnp.full(shape.rows, -jnp.inf, jnp.float32),
        jnp.zeros(shape.rows, jnp.float32),
        *places(first_piece),
    )
    begin = 0
    if shape.sink_queries:
        # Sinks are in the first pieces. Their separate loop keeps the others' loop pipelined.
        begin = jnp.clip(refs.num_repositioned[tile] - first_piece, 0, num_pieces)
        carry = lax.fori_loop(0, begin, functools.partial(body, with_sinks=True), carry)
    return lax.fori_loop(begin, num_pieces, body, carry)[:3]


def _queries(q_ref, tile, head, first: int, width: int, shape: Shape):
    """Loads columns first .. first + width of a tile's queries, [rows, a power of two]."""
    row, column, q_head, mask = matrix_places(shape, head, width)
    return plt.load(q_ref.at[tile, row // shape.group, q_head, first + column], mask=mask, other=0.0)


def _piece_loader(refs: Inputs, shape: Shape, layer, head, newest):
    """Function of the rows of a piece's keys and their text positions that loads its keys, by `Shape.key_parts`, and
    values [64, columns]; zeros for positions after the newest query."""
    parts = shape.block_size // shape.size
    # Units between a block's first and this head's keys, and from there to its values.
    keys = (layer * 2 * shape.num_kv_heads + head) * parts
    values = shape.num_kv_heads * parts

    def load(row, kv_pos):
        row, readable = row + keys * shape.size, kv_pos <= newest

        def columns_of(ref, row, first: int, width: int):
            """Loads columns first .. first + width of rows, [64, a power of two]."""
            columns = pl.next_power_of_2(width)
            column = _along(jnp.arange(columns, dtype=jnp.int32), 1, TILE_KV)
            # A weight of 0 does not silence a NaN in an unwritten slot.
            mask = _along(readable, 0, columns)
            if columns != width:
                mask &= column < width
            return plt.load(ref.at[_along(row, 0, columns), first + column], mask=mask, other=0.0)

        k = tuple(columns_of(refs.pool, row, *part) for part in shape.key_parts)
        if shape.rotates:
            a, b = (x.astype(jnp.float32) for x in k)
            cos, sin = (columns_of(table, kv_pos, 0, shape.head_dim // 2) for table in refs.rope)
            k = tuple(x.astype(k[0].dtype) for x in (a * cos - b * sin, b * cos + a * sin))
        return k, columns_of(refs.pool, row + values * shape.size, 0, shape.head_dim)

    return load


def _absorb(acc, top, total, scores, v):
    """One step of the online softmax, in base 2."""
    new_top = jnp.maximum(top, scores.max(axis=1))
    # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp2(top - base)
    weights = jnp.exp2(scores - base[:, None])
    acc = acc * fade[:, None] + _dot(weights.astype(v.dtype), v)
    return acc, new_top, total * fade + weights.sum(axis=1)


def _places(refs: Inputs, shape: Shape, tile, piece):
    """Row of the pool [rows, H] of each slot's key, without layer and head, and text position."""
    size = shape.size
    slot = jnp.arange(TILE_KV, dtype=jnp.int32)
    index = jnp.minimum(piece * (TILE_KV // size) + slot // size, refs.units.shape[1] - 1)
    row = plt.load(refs.units.at[tile, index]) * size + slot % size
    return row, plt.load(refs.starts.at[tile, index]) + slot % size


def _with_sinks(refs: Inputs, shape: Shape, tile, head, here, kv_pos, k, scores):
    """Scores in which the keys that are `here` repositioned sinks are scored by the queries for them."""
    row, column, q_head, mask = matrix_places(shape, head)

    def with_sink(j, scores):
        q_sink = plt.load(refs.q_sink.at[tile, row // shape.group, j, q_head, column], mask=mask, other=0.0)
        mine = here & (jnp.minimum(kv_pos, shape.sink_queries - 1) == j)
        return jnp.where(mine, _dot_t(q_sink, k), scores)

    return lax.fori_loop(0, shape.sink_queries, with_sink, scores)


def _capped(scores, soft_cap: float | None):
    """Scores with soft cap, in base 2."""
    if soft_cap is None:
        return scores * LOG2E
    return jnp.tanh(scores * (1 / soft_cap)) * (soft_cap * LOG2E)


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


def matrix_places(shape: Shape, head, width: int = 0):
    """Row, column, query head and its existence, for each element of a matrix [rows, columns that hold `width`], by
    default the head dim."""
    width = width or shape.head_dim
    columns = pl.next_power_of_2(width)
    row = _along(jnp.arange(shape.rows, dtype=jnp.int32), 0, columns)
    column = _along(jnp.arange(columns, dtype=jnp.int32), 1, shape.rows)
    mask = (row < shape.q_tile * shape.group) & (column < width)
    return row, column, head * shape.group + row % shape.group, mask


def _positions(pos_ref, tile, shape: Shape):
    """[rows] text positions of the queries; -1 without one."""
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
