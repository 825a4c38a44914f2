"""Ragged paged attention in Pallas-Triton, for Ampere, Ada and Hopper: tiles of many queries, for chunked prefill.

One program per (query tile, kv head), the last tiles first as they have the most keys. Its matrix rows are the Q
queries of the tile times the G query heads of the kv head. It walks the units of `work.schedule`, 64 tokens at a time:

    K [64, H], V [64, H]   rows gathered with cp.async, `num_stages` pieces ahead; unreadable slots become zeros
    Q K^T [rows, 64]       soft cap, mask (pieces that need one), online softmax in base 2
    P V [rows, H]          summed in float32

`parts` has the loop, which `decode` uses too.
"""

from __future__ import annotations

import functools

import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.contract import Call, Kernel, Result
from pallas_kernels.patterns import FAR
from pallas_kernels.triton import parts
from pallas_kernels.work import TILE_KV


def attend(call: Call, work: None = None, *, tuning: parts.Tuning) -> Result:
    """Attends a call; `pallas_kernels.contract` has the arguments.

    Raises:
      NotImplementedError: the dtype, head dim, block size or an option is not one of these kernels', or more than 128
        query heads share a kv head (64 with head_dim 256, 32 with q_sink or key_rope, 16 with q_sink and head_dim 256).
    """
    whole, call = call, parts.narrow(call, max_rows=128)
    shape = parts.shape_of(call)
    units = parts.schedule(call, num_workers=1)
    num_pieces = (units.starts[:, :: TILE_KV // shape.size] < FAR).sum(axis=1)
    out, lse = pl.pallas_call(
        functools.partial(_tile_kernel, shape=shape),
        out_shape=parts.outputs(call),
        grid=(call.q.shape[0], shape.num_kv_heads),
        **parts.parameters("triton_ragged_attention", shape, tuning),
    )(parts.Inputs.of(call, units), num_pieces.astype(jnp.int32), parts.sinks_of(call))
    return parts.result_of(whole, out, lse)


def _tile_kernel(refs: parts.Inputs, pieces_ref, logits_ref, out_ref, lse_ref, *, shape: parts.Shape):
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    head = pl.program_id(1)
    acc, top, total = parts.attend(refs, tile, head, 0, pieces_ref[tile], shape=shape)
    parts.store_result(out_ref, lse_ref, logits_ref, refs.positions, tile, head, acc, top, total, shape)


KERNEL = Kernel(attend, parts.Tuning())
