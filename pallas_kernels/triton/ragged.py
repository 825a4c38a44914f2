"""Ragged paged attention in Pallas-Triton, for Ampere, Ada and Hopper: tiles of many queries, for chunked prefill.

One program per (query tile, kv head), the last tiles first as they have the most keys. Its matrix rows are the Q
queries of the tile times the G query heads of the kv head. It walks the units of `work.plan`, 64 tokens at a time:

    K [64, H], V [64, H]   rows gathered with cp.async, `num_stages` pieces ahead; unreadable slots become zeros
    Q K^T [rows, 64]       soft cap, mask (pieces that need one), online softmax in base 2
    P V [rows, H]          summed in float32

`parts` has the loop, which `decode` uses too.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.patterns import FAR, FULL, Pattern
from pallas_kernels.triton import parts
from pallas_kernels.work import TILE_KV


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
    num_warps: int | None = None,
    num_stages: int | None = None,
    interpret: bool = False,
):
    """Attends the queries of each tile to the slots of its block table; see `reference.ragged_paged_attention`.

    Args:
      num_warps, num_stages: of each program.
      interpret: run it with jax operations on any device.

    Raises:
      NotImplementedError: the dtype, head dim or block size is not one of these kernels', or more than 128 query heads
        share a kv head (64 with head_dim 256, 32 with q_sink, 16 with both).
    """
    whole_shape = q.shape
    q, tables, starts, positions, q_sink = parts.narrow(q, tables, starts, positions, q_sink, pool, max_rows=128)
    shape = parts.shape_of(q, pool, q_sink, soft_cap)
    work = parts.plan_work(tables, starts, positions, pattern, pool, num_workers=1)
    num_pieces = (work.starts[:, :: TILE_KV // shape.size] < FAR).sum(axis=1)
    out, lse = pl.pallas_call(
        functools.partial(_tile_kernel, shape=shape),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, out_dtype or q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ),
        grid=(q.shape[0], shape.num_kv_heads),
        **parts.parameters("triton_ragged_attention", shape, num_warps, num_stages, interpret),
    )(
        *parts.inputs(q, pool, positions, pattern, layer, q_sink, work),
        num_pieces.astype(jnp.int32),
        parts.sinks_of(sink_logits, q.shape[2]),
    )
    out = out.reshape(whole_shape)
    return (out, lse.reshape(whole_shape[:3])) if return_lse else out


def _tile_kernel(q_ref, sink_ref, pool_ref, pos_ref, units_ref, starts_ref, care_ref, newest_ref, num_moved_ref,
                 numbers_ref, pieces_ref, logits_ref, out_ref, lse_ref, *, shape: parts.Shape):  # fmt: skip
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    head = pl.program_id(1)
    acc, top, total = parts.attend(
        q_ref, sink_ref, pool_ref, pos_ref, units_ref, starts_ref, care_ref, newest_ref, num_moved_ref, numbers_ref,
        tile, head, 0, pieces_ref[tile], shape=shape,
    )  # fmt: skip
    parts.store_result(out_ref, lse_ref, logits_ref, pos_ref, tile, head, acc, top, total, shape)
