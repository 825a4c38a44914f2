"""Joins partial results of attention by their log-sum-exp, for Hopper, in Mosaic GPU."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import LOG2E, ROWS, Config, int32, launch, layout
from pallas_kernels.work import Work


class Refs(NamedTuple):
    """Arrays of the kernel, in its order: inputs, outputs, scratch; named as those of `decode_warpgroup`."""

    partial_g: Any
    partial_lse_g: Any
    of_pair_g: Any
    sinks_g: Any
    out_g: Any
    lse_g: Any
    o_s: Any
    l_s: Any
    sinks_s: Any
    result_s: Any
    o_bar: Any
    sink_bar: Any


def _merge(*refs, config: Config, depth: int) -> None:
    """One (query tile, kv head) pair and part of the columns per block of threads: the pair's segments are summed,
    weighted by their log-sum-exp."""
    r = Refs(*refs)
    width, columns = config.width, config.columns
    pair = lax.div(lax.axis_index("index"), int32(config.warpgroups))
    part = lax.rem(lax.axis_index("index"), int32(config.warpgroups))
    first, until = r.of_pair_g[pair], r.of_pair_g[pair + 1]

    def fetch(segment, slot):
        plgpu.copy_gmem_to_smem(r.partial_g.at[segment, part], r.o_s.at[slot, pl.ds(0, config.rows)], r.o_bar.at[slot])
        plgpu.copy_gmem_to_smem(r.partial_lse_g.at[segment], r.l_s.at[slot], r.o_bar.at[slot])

    plgpu.copy_gmem_to_smem(r.sinks_g.at[lax.rem(pair, config.num_kv_heads)], r.sinks_s, r.sink_bar)
    for slot in range(depth):

        @pl.when(first + slot < until)
        def _(slot=slot):
            fetch(first + slot, int32(slot))

    def absorb(segment, carry):
        acc, top, total = carry
        slot = lax.rem(segment - first, int32(depth))
        plgpu.barrier_wait(r.o_bar.at[slot])
        lse = r.l_s[slot]

        new_top = jnp.maximum(top, lse)
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        fade, weight = jnp.exp2(top - base), jnp.exp2(lse - base)
        fade_2d, weight_2d = (lax.broadcast_in_dim(x, (ROWS, columns), [0]) for x in (fade, weight))
        acc = tuple(a * fade_2d + r.o_s[slot, :, pl.ds(i * columns, columns)] * weight_2d for i, a in enumerate(acc))

        @pl.when(segment + depth < until)
        def _():
            fetch(segment + depth, slot)

        return acc, new_top, total * fade + weight

    nothing = (
        (jnp.zeros((ROWS, columns), jnp.float32),) * (width // columns),
        jnp.full((ROWS,), -jnp.inf, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
    )
    _store(r, config, pair, part, *lax.fori_loop(first, until, absorb, nothing))


def _store(r: Refs, config: Config, pair, part, acc, top, total) -> None:
    """Stores a pair's result, normalised, and its log-sum-exp, both with the learned sink."""
    columns = config.columns
    # A learned sink is one more logit, without a value.
    plgpu.barrier_wait(r.sink_bar)
    sink = r.sinks_s[...]
    new_top = jnp.maximum(top, sink)
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp2(top - base)
    total = total * fade + jnp.exp2(sink - base)
    nothing = total == 0.0
    scale = lax.broadcast_in_dim(fade / jnp.where(nothing, 1.0, total), (ROWS, columns), [0])
    boxes, _, box = r.result_s.shape
    starts = [i * box for i in range(boxes)]
    for i, start in enumerate(starts):
        a = acc[start // columns] * scale
        r.result_s[i] = a[:, start % columns : start % columns + box].astype(r.result_s.dtype)
    r.l_s[0] = jnp.where(top == -jnp.inf, -jnp.inf, base * (1 / LOG2E) + jnp.log(jnp.where(nothing, 1.0, total)))
    plgpu.commit_smem()
    for i, start in enumerate(starts):
        box_g = r.out_g.at[pair, :, pl.ds(part * config.width + start, box)]
        plgpu.copy_smem_to_gmem(r.result_s.at[i, pl.ds(0, r.out_g.shape[1])], box_g)
    pl.when(part == 0)(lambda: plgpu.copy_smem_to_gmem(r.l_s.at[0, pl.ds(0, config.rows)], r.lse_g.at[pair]))
    plgpu.wait_smem_to_gmem(0)


def merge_segments(partial, partial_lse, work: Work, sinks, config: Config, num_rows: int, out_dtype, interpret):
    """Joins segments: out [S*K, num_rows, H] in out_dtype and natural log-sum-exp [S*K, num_rows] float32.

    Args:
      num_rows: those that are not padding.
      sinks: [K, 64] learned sink logits in base 2 of the rows of each kv head; -inf where there are none.
    """
    pairs, depth, parts = work.of_pair.shape[0] - 1, 2, config.warpgroups
    width = config.head_dim // parts
    # A TMA box of the result is at most as wide as a swizzle atom, 128 bytes. Where fewer than 8 rows are copied,
    # Mosaic GPU tiles by that many rows; a second tile of columns would begin inside an atom, and its stores, which
    # swizzle relative to the tile, would disagree with the TMA engine, which swizzles by absolute address.
    box = min(config.columns, 128 // jnp.dtype(out_dtype).itemsize)
    kernel = launch(
        "hopper_merge",
        functools.partial(_merge, config=config, depth=depth),
        (pairs * parts,),
        out_type=(
            jax.ShapeDtypeStruct((pairs, num_rows, config.head_dim), out_dtype),
            jax.ShapeDtypeStruct((pairs, config.rows), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((depth, ROWS, width), jnp.float32, transforms=layout(width, 4)),
            plgpu.SMEM((depth, ROWS), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((width // box, ROWS, box), out_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=depth),
            plgpu.Barrier(num_arrivals=1),
        ),
        interpret=interpret,
    )
    out, lse = kernel(partial, partial_lse, work.of_pair, sinks)
    return out, lse[:, :num_rows]
