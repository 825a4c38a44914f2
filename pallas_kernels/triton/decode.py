"""Paged attention in Pallas-Triton for few queries to a row and many keys: decode. Bound by memory.

The stretches of `work.schedule` are programs: each walks some pieces of one (query tile, kv head) with `parts`'
loop and leaves a partial result; a second kernel merges a pair's results by their log-sum-exp. So the time follows all
visible tokens together, however they are spread over rows.

Source: split keys, Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Call, Kernel, Result
from pallas_kernels.triton import parts
from pallas_kernels.work import HEAD, NUM_PIECES, PIECE, TILE


def attend(call: Call, work: None = None, *, tuning: parts.Tuning) -> Result:
    """Attends a call; `pallas_kernels.contract` has the arguments.

    Raises:
      NotImplementedError: these kernels do not support the dtype, head dim, block size or an option, or more than 64
        query heads share a kv head (32 with q_sink or key_rope, 16 with q_sink if the head dim is 256).
    """
    whole, call = call, parts.narrow(call, max_rows=64)
    shape = parts.shape_of(call)
    stretches = parts.schedule(call, tuning.num_workers)
    num_segments, num_rows = stretches.segments.shape[0], shape.q_tile * shape.group
    partial, top, total = pl.pallas_call(
        functools.partial(_segment_kernel, shape=shape),
        out_shape=(
            jax.ShapeDtypeStruct((num_segments, num_rows, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_segments, num_rows), jnp.float32),
            jax.ShapeDtypeStruct((num_segments, num_rows), jnp.float32),
        ),
        grid=(num_segments,),
        **parts.parameters("triton_decode_attention", shape, tuning),
    )(parts.Inputs.of(call, stretches), stretches.segments)
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, shape=shape),
        out_shape=parts.outputs(call),
        grid=(call.q.shape[0] * shape.num_kv_heads,),
        **parts.parameters("triton_decode_merge", shape, dataclasses.replace(tuning, num_warps=4, num_stages=2)),
    )(partial, top, total, stretches.of_pair, call.positions, parts.sinks_of(call))
    return parts.result_of(whole, out, lse)


def _segment_kernel(refs: parts.Inputs, segments_ref, partial_ref, top_ref, total_ref, *, shape: parts.Shape):
    segment = pl.program_id(0)
    num_pieces = segments_ref[segment, NUM_PIECES]

    @pl.when(num_pieces > 0)
    def _():
        tile, head, first_piece = (segments_ref[segment, i] for i in (TILE, HEAD, PIECE))
        acc, top, total = parts.attend(refs, tile, head, first_piece, num_pieces, shape=shape)
        row, row_2d, column, inside, inside_2d = _partial_places(shape)
        plt.store(partial_ref.at[segment, row_2d, column], acc, mask=inside_2d)
        plt.store(top_ref.at[segment, row], top, mask=inside)
        plt.store(total_ref.at[segment, row], total, mask=inside)


def _merge_kernel(
    partial_ref, top_ref, total_ref, of_pair_ref, pos_ref, logits_ref, out_ref, lse_ref, *, shape: parts.Shape
):
    """Adds up the segments of one (query tile, kv head) pair, each weighted by its largest score."""
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
    """Rows, columns and their existence, for a partial result [rows, columns]; vectors and matrices."""
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    num_rows = shape.q_tile * shape.group
    row_2d, column, _, inside_2d = parts.matrix_places(shape, 0)
    return row, row_2d, column, row < num_rows, inside_2d


KERNEL = Kernel(attend, parts.Tuning())
