"""Paged attention in Pallas-Triton for few queries to a row and many keys: decode. Bound by memory.

The stretches of `work.plan` are programs: each walks some pieces of one (query tile, kv head) with `parts`'
loop and leaves a partial result; a second kernel merges those of a pair by their log-sum-exp. So the time follows all
visible tokens together, however they are spread over rows.

Source: split keys, Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.patterns import FULL, Pattern
from pallas_kernels.triton import parts
from pallas_kernels.work import HEAD, NUM_PIECES, PIECE, TILE


def ragged_paged_attention(
    q,
    pool,
    tables,
    starts,
    positions,
    *,
    layer,
    pattern: Pattern = FULL,
    q_sink=None,
    soft_cap: float | None = None,
    sink_logits=None,
    return_lse: bool = False,
    out_dtype=None,
    num_workers: int = 512,
    num_warps: int | None = None,
    num_stages: int | None = None,
    interpret: bool = False,
):
    """Attends the queries of each tile to the slots of its block table; see `reference.ragged_paged_attention`.

    Args:
      num_workers: equal stretches that the work is cut into, a few times the multiprocessors. As many programs again
        as there are (query tile, kv head) pairs run.
      num_warps, num_stages: of each program.
      interpret: run it with jax operations on any device.

    Raises:
      NotImplementedError: as `ragged.ragged_paged_attention` does, but 64 query heads per kv head at most.
    """
    whole_shape = q.shape
    q, tables, starts, positions, q_sink = parts.narrow(q, tables, starts, positions, q_sink, pool, max_rows=64)
    shape = parts.shape_of(q, pool, q_sink, soft_cap)
    work = parts.plan_work(tables, starts, positions, pattern, pool, num_workers)
    num_segments, num_rows = work.segments.shape[0], shape.q_tile * shape.group
    partial, top, total = pl.pallas_call(
        functools.partial(_segment_kernel, shape=shape),
        out_shape=(
            jax.ShapeDtypeStruct((num_segments, num_rows, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_segments, num_rows), jnp.float32),
            jax.ShapeDtypeStruct((num_segments, num_rows), jnp.float32),
        ),
        grid=(num_segments,),
        **parts.parameters("triton_decode_attention", shape, num_warps, num_stages, interpret),
    )(*parts.inputs(q, pool, positions, pattern, layer, q_sink, work), work.segments)
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, shape=shape),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, out_dtype or q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ),
        grid=(q.shape[0] * shape.num_kv_heads,),
        **parts.parameters("triton_decode_merge", shape, 4, 2, interpret),
    )(partial, top, total, work.of_pair, positions, parts.sinks_of(sink_logits, q.shape[2]))
    out = out.reshape(whole_shape)
    return (out, lse.reshape(whole_shape[:3])) if return_lse else out


def _segment_kernel(q_ref, sink_ref, pool_ref, pos_ref, units_ref, starts_ref, care_ref, newest_ref, num_moved_ref,
                    numbers_ref, segments_ref, partial_ref, top_ref, total_ref, *, shape: parts.Shape):  # fmt: skip
    segment = pl.program_id(0)
    num_pieces = segments_ref[segment, NUM_PIECES]

    @pl.when(num_pieces > 0)
    def _():
        acc, top, total = parts.attend(
            q_ref, sink_ref, pool_ref, pos_ref, units_ref, starts_ref, care_ref, newest_ref, num_moved_ref, numbers_ref,
            segments_ref[segment, TILE], segments_ref[segment, HEAD], segments_ref[segment, PIECE], num_pieces,
            shape=shape,
        )  # fmt: skip
        row, row_2d, column, inside, inside_2d = _partial_places(shape)
        plt.store(partial_ref.at[segment, row_2d, column], acc, mask=inside_2d)
        plt.store(top_ref.at[segment, row], top, mask=inside)
        plt.store(total_ref.at[segment, row], total, mask=inside)


def _merge_kernel(partial_ref, top_ref, total_ref, of_pair_ref, pos_ref, logits_ref, out_ref, lse_ref, *,
                  shape: parts.Shape):  # fmt: skip
    """Adds up the segments of one (query tile, kv head) pair, each weighted as its largest score says."""
    pair = pl.program_id(0)
    row, row_2d, column, inside, inside_2d = _partial_places(shape)

    def absorb(segment, carry):
        acc, top, total = carry
        other_top = plt.load(top_ref.at[segment, row], mask=inside, other=-jnp.inf)
        new_top = jnp.maximum(top, other_top)
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        fade, weight = jnp.exp2(top - base), jnp.exp2(other_top - base)
        other = plt.load(partial_ref.at[segment, row_2d, column], mask=inside_2d, other=0.0)
        acc = acc * fade[:, None] + other * weight[:, None]
        return acc, new_top, total * fade + plt.load(total_ref.at[segment, row], mask=inside, other=0.0) * weight

    nothing = (
        jnp.zeros((shape.rows, shape.columns), jnp.float32),
        jnp.full(shape.rows, -jnp.inf, jnp.float32),
        jnp.zeros(shape.rows, jnp.float32),
    )
    acc, top, total = lax.fori_loop(of_pair_ref[pair], of_pair_ref[pair + 1], absorb, nothing)
    tile, head = lax.div(pair, shape.num_kv_heads), lax.rem(pair, shape.num_kv_heads)
    parts.store_result(out_ref, lse_ref, logits_ref, pos_ref, tile, head, acc, top, total, shape)


def _partial_places(shape: parts.Shape):
    """Rows, columns and which of them exist, of a partial result [rows, columns]; vectors and matrices."""
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    num_rows = shape.q_tile * shape.group
    row_2d, column, _, inside_2d = parts.matrix_places(shape, 0)
    return row, row_2d, column, row < num_rows, inside_2d
