"""Joins partial results of attention by their log-sum-exp, for Hopper, in Mosaic GPU: only for split pairs.

A pair (query tile, kv head) with one segment has its final result from the attention already. Each worker's stretch
begins inside at most one pair, so there are at most as many split pairs as workers: blocks of threads number w join
the pair in which stretch w begins, where no earlier stretch begins in it. Each holds 128 numbers of the result, one in
a thread, and reads GROUP segments of them at a time, which are adjacent in memory. No shared memory and no
barriers: up to 16 blocks on a multiprocessor hide each other's waits.

Pairs that see nothing have no segment: the same blocks write their zeros.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import interpreter
from pallas_kernels.hopper.common import finished, int32, load, store
from pallas_kernels.work import HEAD, TILE, Work

THREADS = 128
# Segments, and pairs, that are read at once.
GROUP = 8
# Blocks of threads that share a pair, at most.
PARTS = 8


def whole_rows(num_rows: int, head_dim: int) -> int:
    """Returns the least number of rows, from num_rows on, that blocks of threads can hold 128 numbers each of."""
    step = THREADS // math.gcd(head_dim, THREADS)
    return -(-num_rows // step) * step


class Refs(NamedTuple):
    """Arrays of the kernel, all in global memory: inputs, then updated ones."""

    partial: Any
    partial_lse: Any
    segments: Any
    first: Any
    of_pair: Any
    sinks: Any
    out: Any
    lse: Any


def _merge(*refs, num_kv_heads: int, head_dim: int, num_workers: int, parts: int, has_sinks: bool) -> None:
    """The kernel. One block of threads: part of the pair in which one stretch begins, and of pairs without segments."""
    given = list(refs)
    if not has_sinks:
        given.insert(Refs._fields.index("sinks"), None)
    r = Refs(*given)
    worker, part = (f(lax.axis_index("index"), int32(parts)) for f in (lax.div, lax.rem))
    chunks = r.out.shape[1]
    of_part = lax.div(chunks - 1 - part, int32(parts)) + 1

    def for_chunks(do) -> None:
        def turn(i, carry):
            do(part + i * parts)
            return carry

        lax.fori_loop(0, of_part, turn, None)

    segment = jnp.minimum(r.first[worker], r.segments.shape[0] - 1)
    pair = r.segments[segment, TILE] * num_kv_heads + r.segments[segment, HEAD]
    first, until = r.of_pair[pair], r.of_pair[pair + 1]
    # The worker begins inside of the pair, as the first one that does; beyond the last segment it does not work.
    splits = (first + 1 == segment) & (segment < until)

    @pl.when(splits)
    def _():
        for_chunks(functools.partial(_join_values, r, num_kv_heads, head_dim, pair, first, until))

        @pl.when(part == 0)
        def _():
            _join_lse(r, num_kv_heads, pair, first, until)

    pairs = r.out.shape[0]

    def clear(i, carry):
        numbers = [worker + (i * GROUP + j) * num_workers for j in range(GROUP)]
        places = [jnp.minimum(n, pairs - 1) for n in numbers]
        empty = [(n < pairs) & (r.of_pair[at] == r.of_pair[at + 1]) for n, at in zip(numbers, places)]
        for at, is_empty in zip(places, empty):

            @pl.when(is_empty)
            def _(at=at):
                for_chunks(lambda chunk: store(r.out, (at, chunk), _full(THREADS, 0.0).astype(r.out.dtype)))
                pl.when(part == 0)(lambda: store(r.lse, (at,), _full(r.lse.shape[1], -jnp.inf)))

        return carry

    lax.fori_loop(0, -(-pairs // (num_workers * GROUP)), clear, None)


def _spread(x) -> jax.Array:
    """x [128], one number a thread, or [64], as rows of a wgmma: left to itself, Mosaic GPU searches for minutes."""
    if interpreter.loads_plainly():
        return x
    layout = plgpu.Layout.WG_STRIDED((THREADS,), 1) if len(x) == THREADS else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(x, layout)


def _full(size: int, x) -> jax.Array:
    return _spread(jnp.full((size,), x, jnp.float32))


def _joined(read, first, until, size: int):
    """Sums segments `first` to `until`. read: gives a segment's log2-sum-exp and values, [size] each.

    Returns:
      values, weighted by exp2(log2-sum-exp - top); top; the sum of these weights.
    """

    def absorb(i, carry):
        acc, top, total = carry
        segments = [first + i * GROUP + j for j in range(GROUP)]
        found = [read(jnp.minimum(x, until - 1)) for x in segments]
        logs = [lse + jnp.where(x < until, 0.0, -jnp.inf) for x, (lse, _) in zip(segments, found)]
        new_top = functools.reduce(jnp.maximum, logs, top)
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        fade = jnp.exp2(top - base)
        acc, total = acc * fade, total * fade
        for lse, (_, x) in zip(logs, found):
            weight = jnp.exp2(lse - base)
            acc, total = acc + x * weight, total + weight
        return acc, new_top, total

    nothing = tuple(_full(size, x) for x in (0.0, -jnp.inf, 0.0))
    return lax.fori_loop(0, lax.div(until - first + GROUP - 1, int32(GROUP)), absorb, nothing)


def _join_values(r: Refs, num_kv_heads: int, head_dim: int, pair, first, until, chunk) -> None:
    """Writes 128 numbers of a pair's result."""
    # Rows that these belong to: one, or two of a head dim that is no multiple of 128.
    row = lax.div(chunk * THREADS, int32(head_dim))
    column = _spread(lax.broadcasted_iota(jnp.int32, (THREADS,), 0))
    next_row_from = (row + 1) * head_dim - chunk * THREADS

    def of_rows(ref, index):
        x = _full(THREADS, ref[index, row])
        if head_dim % THREADS == 0:
            return x
        after = _full(THREADS, ref[index, jnp.minimum(row + 1, ref.shape[1] - 1)])
        return jnp.where(column < next_row_from, x, after)

    def read(segment):
        return of_rows(r.partial_lse, segment), _spread(load(r.partial, (segment, chunk)))

    acc, top, total = _joined(read, first, until, THREADS)
    sink = None if r.sinks is None else of_rows(r.sinks, lax.rem(pair, int32(num_kv_heads)))
    store(r.out, (pair, chunk), (acc * finished(top, total, sink)[0]).astype(r.out.dtype))


def _join_lse(r: Refs, num_kv_heads: int, pair, first, until) -> None:
    """Writes a pair's log-sum-exp."""

    def read(segment):
        return _spread(load(r.partial_lse, (segment,))), _full(rows, 0.0)

    rows = r.lse.shape[1]
    _, top, total = _joined(read, first, until, rows)
    sink = None if r.sinks is None else _spread(load(r.sinks, (lax.rem(pair, int32(num_kv_heads)),)))
    store(r.lse, (pair,), finished(top, total, sink)[1])


def merge_segments(partial, partial_lse, work: Work, sinks, out, lse, interpret):
    """Joins the segments of split pairs: `out` and `lse` as the attention left them, completed.

    Args:
      partial, partial_lse: [N, rows, H] and [N, 64] float32, of segments: normalised results and log2-sum-exp. Here
        and in lse [N, 128] if rows are more than 64.
      sinks: [K, 64] learned sink logits in base 2 of the rows of each kv head; None without.
      out, lse: [S*K, R, H] and [S*K, 64]; R as `whole_rows` gives it.
    """
    pairs, num_rows, head_dim = out.shape
    num_kv_heads = pairs // len(work.units)
    num_workers = work.num_workers(num_kv_heads)
    chunks = num_rows * head_dim // THREADS
    parts = min(chunks, PARTS)
    inputs = [partial.reshape(len(partial), -1, THREADS), partial_lse, work.segments, work.first, work.of_pair]
    inputs += [] if sinks is None else [sinks]
    refs = [jax.new_ref(x, memory_space=plgpu.GMEM) for x in (out.reshape(pairs, chunks, THREADS), lse)]
    parameters = interpreter.parameters(interpret)
    body = functools.partial(
        _merge,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_workers=num_workers,
        parts=parts,
        has_sinks=sinks is not None,
    )
    # pl.kernel, not plgpu.kernel: the latter's rule for vmap does not let refs through on jax 0.10.
    kernel: Any = pl.kernel(
        interpreter.interpreted(body) if parameters else body,
        out_type=(),
        mesh=plgpu.Mesh(grid=(num_workers * parts,), grid_names=("index",), kernel_name="hopper_merge"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,  # safe here: threads exchange nothing
        ),
        interpret=parameters,
        name="hopper_merge",
    )
    kernel(*inputs, *refs)
    out_ref, lse_ref = refs
    return jax.freeze(out_ref).reshape(out.shape), jax.freeze(lse_ref)
