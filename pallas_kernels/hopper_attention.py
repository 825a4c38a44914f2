"""Ragged paged attention for Hopper, in Mosaic GPU: few queries to a row, many keys. Bound by memory.

Each block of threads is one warpgroup that walks its stretch of `work.plan`. Two of them fit a multiprocessor, so that
one computes while the other waits. Per piece of 64 tokens:

    TMA, one box per unit     K [64, H], V [64, H] into one of `stages` buffers, asked for `stages` pieces ahead
    wgmma 64 x 64 x H         scores: rows are queries x query heads of the group, padded to 64
    registers                 soft cap, mask (pieces that need one), online softmax in base 2
    wgmma 64 x H x 64         weights as bf16 or f16 from registers, times V; summed in float32 outside of the wgmma

The whole pool comes in with the index of the layer: a slice of it would be a copy. A stretch that begins or ends inside
a (query tile, kv head) pair leaves a partial result; `_merge_kernel` joins those of a pair by their log-sum-exp.

Source: online softmax, FlashAttention-2, arXiv:2307.08691, algorithm 1; split keys, Flash-Decoding; one box per block
because TMA gathers need Blackwell.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.patterns import Pattern
from pallas_kernels.work import DIRTY, HEAD, MASK, NUM_PIECES, PIECE, TILE, TILE_KV, Work, unit_tokens

ROWS = 64  # of a wgmma
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """What a kernel is compiled for. stages: pieces of keys and values that a block of threads holds at once."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    rows: int
    dtype: jnp.dtype
    num_workers: int = 264
    stages: int = 2
    soft_cap: float | None = None

    @property
    def columns(self) -> int:
        """Columns of the output that are computed and stored together."""
        return 64 if self.head_dim % 64 == 0 else 32


def _tiles(width: int, itemsize: int):
    """Layout in shared memory of matrices [..., width]: what wgmma and TMA want, free of bank conflicts."""
    swizzle = 128 if width * itemsize % 128 == 0 else 64
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _int(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def _attend(q_g, pos_g, pool_g, units_g, starts_g, care_g, newest_g, segments_g, first_g, numbers_g, out_g, lse_g,
            q_s, pos_s, k_s, v_s, p_s, out_s, lse_s, q_bar, k_bar, v_bar, *, config: Config):  # fmt: skip
    size = unit_tokens(config.block_size)
    per_piece, parts, h = TILE_KV // size, config.block_size // size, config.head_dim
    stages, kv_heads, columns = config.stages, config.num_kv_heads, config.columns
    worker = lax.axis_index("worker")
    pattern = Pattern(*(numbers_g[i] for i in range(len(Pattern._fields))))
    layer = numbers_g[len(Pattern._fields)]
    first, until = first_g[worker], first_g[worker + 1]

    def fetch(segment, piece, stage, which):
        """Asks for keys (0) or values (1) of one piece of a segment."""
        tile, head = segments_g[segment, TILE], segments_g[segment, HEAD]
        row = ((layer * 2 + which) * kv_heads + head) * parts
        target, barrier = ((k_s, k_bar), (v_s, v_bar))[which]
        for i in range(per_piece):
            unit = units_g[tile, piece * per_piece + i] + row
            plgpu.copy_gmem_to_smem(
                pool_g.at[unit], target.at[stage, pl.ds(i * size, size)], barrier.at[stage]
            )

    def after(segment, piece):
        """The piece after one, perhaps the first of the next segment."""
        done = piece + 1 == segments_g[segment, PIECE] + segments_g[segment, NUM_PIECES]
        following = jnp.minimum(segment + 1, segments_g.shape[0] - 1)
        return jnp.where(done, segment + 1, segment), jnp.where(done, segments_g[following, PIECE], piece + 1)

    def fetch_queries(segment):
        tile = segments_g[segment, TILE]
        pair = tile * kv_heads + segments_g[segment, HEAD]
        plgpu.copy_gmem_to_smem(q_g.at[pair], q_s.at[pl.ds(0, config.rows)], q_bar)
        plgpu.copy_gmem_to_smem(pos_g.at[tile], pos_s, q_bar)

    @pl.when(first < until)
    def _():
        if config.rows < ROWS:
            q_s[...] = jnp.zeros(q_s.shape, q_s.dtype)
            plgpu.commit_smem()
        fetch_queries(first)

    ahead = (first, segments_g[jnp.minimum(first, segments_g.shape[0] - 1), PIECE])
    for stage in range(stages):

        @pl.when(ahead[0] < until)
        def _(ahead=ahead, stage=stage):
            for which in (0, 1):
                fetch(*ahead, _int(stage), which)

        ahead = after(jnp.minimum(ahead[0], segments_g.shape[0] - 1), ahead[1])

    def attend_segment(segment, carry):
        tile, begin, count = (segments_g[segment, i] for i in (TILE, PIECE, NUM_PIECES))
        plgpu.barrier_wait(q_bar)
        q_pos = plgpu.layout_cast(pos_s[...], plgpu.Layout.WGMMA.reduce(1))

        def attend_piece(i, carry):
            acc, top, total, n, ahead_segment, ahead_piece = carry
            stage = lax.rem(n, _int(stages))
            care = care_g[tile, begin + i]
            unit_starts = [starts_g[tile, (begin + i) * per_piece + j] for j in range(per_piece)]
            more = ahead_segment < until
            plgpu.barrier_wait(k_bar.at[stage])

            def scores_of(acc_ref):
                plgpu.wgmma(acc_ref, q_s, k_s.at[stage].transpose((1, 0)))
                return acc_ref[...]

            s = pl.run_scoped(scores_of, plgpu.ACC((ROWS, TILE_KV), jnp.float32))
            if config.soft_cap is None:
                s = s * LOG2E
            else:
                s = jnp.tanh(s * (1 / config.soft_cap)) * (config.soft_cap * LOG2E)

            def masked(s):
                slot = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
                kv_pos = slot + unit_starts[0]
                for j in range(1, per_piece):
                    kv_pos = jnp.where(slot >= j * size, slot + (unit_starts[j] - j * size), kv_pos)
                seen = pattern.visible(lax.broadcast_in_dim(q_pos, s.shape, [0]), kv_pos)
                return jnp.where(seen, s, -jnp.inf)

            s = lax.cond(care & MASK != 0, masked, lambda s: s, s)

            @pl.when(more)
            def _():
                fetch(ahead_segment, ahead_piece, stage, 0)

            new_top = jnp.maximum(top, s.max(axis=1))
            # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            fade = jnp.exp2(top - base)
            p = jnp.exp2(s - lax.broadcast_in_dim(base, s.shape, [0]))
            total = total * fade + p.sum(axis=1)
            p_s[...] = p.astype(config.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(v_bar.at[stage])

            @pl.when(care & DIRTY != 0)
            def _():
                # A weight of 0 does not silence a NaN in a slot that nobody has written.
                v = plgpu.layout_cast(v_s[stage], plgpu.Layout.WGMMA)
                slot = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
                kv_pos = slot + unit_starts[0]
                for j in range(1, per_piece):
                    kv_pos = jnp.where(slot >= j * size, slot + (unit_starts[j] - j * size), kv_pos)
                v_s[stage] = jnp.where(kv_pos <= newest_g[tile], v, jnp.zeros_like(v))
                plgpu.commit_smem()

            def values_of(*refs):
                for i, ref in enumerate(refs):
                    plgpu.wgmma(ref, p_s, v_s.at[stage, :, pl.ds(i * columns, columns)])
                return tuple(ref[...] for ref in refs)

            more_values = pl.run_scoped(values_of, *[plgpu.ACC((ROWS, columns), jnp.float32)] * len(acc))

            @pl.when(more)
            def _():
                fetch(ahead_segment, ahead_piece, stage, 1)

            acc = tuple(a * lax.broadcast_in_dim(fade, a.shape, [0]) + b for a, b in zip(acc, more_values))
            ahead_segment, ahead_piece = after(jnp.minimum(ahead_segment, segments_g.shape[0] - 1), ahead_piece)
            return acc, new_top, total, n + 1, ahead_segment, ahead_piece

        row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            (plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA),) * (h // columns),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
            *carry,
        )
        acc, top, total, *carry = lax.fori_loop(0, count, attend_piece, state)

        @pl.when(segment + 1 < until)
        def _():
            fetch_queries(segment + 1)

        nothing = total == 0.0
        scale = lax.broadcast_in_dim(1.0 / jnp.where(nothing, 1.0, total), acc[0].shape, [0])
        lse_s[...] = jnp.where(nothing, -jnp.inf, top + jnp.log(jnp.where(nothing, 1.0, total)) * LOG2E)
        for i, a in enumerate(acc):
            out_s[...] = a * scale
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_s.at[pl.ds(0, config.rows)], out_g.at[segment, :, pl.ds(i * columns, columns)]
            )
            if i == 0:
                plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, config.rows)], lse_g.at[segment])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return tuple(carry)

    lax.fori_loop(first, until, attend_segment, (_int(0), *ahead))
    plgpu.wait_smem_to_gmem(0)


def attend(q, positions, pool, work: Work, pattern: Pattern, layer, config: Config, *, interpret=None):
    """Partial attention of each segment: out [N, rows, H] float32 and log2-sum-exp [N, rows]."""
    size, h = unit_tokens(config.block_size), config.head_dim
    n = work.segments.shape[0]
    units = pool.reshape(-1, size, h)
    numbers = jnp.stack([_int(x) for x in (*pattern, layer)])
    tiles = _tiles(h, 2)
    kernel = plgpu.kernel(
        functools.partial(_attend, config=config),
        out_type=(
            jax.ShapeDtypeStruct((n, config.rows, h), jnp.float32),
            jax.ShapeDtypeStruct((n, config.rows), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((ROWS, h), config.dtype, transforms=tiles),
            plgpu.SMEM((ROWS,), jnp.int32),
            plgpu.SMEM((config.stages, TILE_KV, h), config.dtype, transforms=tiles),
            plgpu.SMEM((config.stages, TILE_KV, h), config.dtype, transforms=tiles),
            plgpu.SMEM((ROWS, TILE_KV), config.dtype, transforms=_tiles(TILE_KV, 2)),
            plgpu.SMEM((ROWS, config.columns), jnp.float32, transforms=_tiles(config.columns, 4)),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=TILE_KV // size, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=TILE_KV // size, num_barriers=config.stages),
        ),
        grid=(config.num_workers,),
        grid_names=("worker",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(q, positions, units, work.units, work.starts, work.care, work.newest, work.segments, work.first, numbers)


def _merge(partial_g, partial_lse_g, of_pair_g, sinks_g, out_g, lse_g, o_s, l_s, sinks_s, result_s, o_bar, sink_bar, *,
           config: Config, depth: int):  # fmt: skip
    """One (query tile, kv head) pair per block of threads: its segments are summed, weighted by their log-sum-exp."""
    h, rows = config.head_dim, config.rows
    pair = lax.axis_index("pair")
    first, until = of_pair_g[pair], of_pair_g[pair + 1]

    def fetch(segment, slot):
        plgpu.copy_gmem_to_smem(partial_g.at[segment], o_s.at[slot, pl.ds(0, rows)], o_bar.at[slot])
        plgpu.copy_gmem_to_smem(partial_lse_g.at[segment], l_s.at[slot, pl.ds(0, rows)], o_bar.at[slot])

    plgpu.copy_gmem_to_smem(sinks_g.at[lax.rem(pair, config.num_kv_heads)], sinks_s, sink_bar)
    for slot in range(depth):

        @pl.when(first + slot < until)
        def _(slot=slot):
            fetch(first + slot, _int(slot))

    def absorb(segment, carry):
        acc, top, total = carry
        slot = lax.rem(segment - first, _int(depth))
        plgpu.barrier_wait(o_bar.at[slot])
        o = plgpu.layout_cast(o_s[slot], plgpu.Layout.WGMMA)
        lse = plgpu.layout_cast(l_s[slot], plgpu.Layout.WGMMA.reduce(1))

        new_top = jnp.maximum(top, lse)
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        fade, weight = jnp.exp2(top - base), jnp.exp2(lse - base)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0]) + o * lax.broadcast_in_dim(weight, o.shape, [0])

        @pl.when(segment + depth < until)
        def _():
            fetch(segment + depth, slot)

        return acc, new_top, total * fade + weight

    row = plgpu.Layout.WGMMA.reduce(1)
    acc, top, total = lax.fori_loop(first, until, absorb, (
        plgpu.layout_cast(jnp.zeros((ROWS, h), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
    ))  # fmt: skip
    # A learned sink is one more logit, without a value.
    plgpu.barrier_wait(sink_bar)
    sink = plgpu.layout_cast(sinks_s[...], row)
    new_top = jnp.maximum(top, sink)
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp2(top - base)
    total = total * fade + jnp.exp2(sink - base)
    nothing = total == 0.0
    scale = fade / jnp.where(nothing, 1.0, total)
    result_s[...] = (acc * lax.broadcast_in_dim(scale, acc.shape, [0])).astype(result_s.dtype)
    l_s[0] = jnp.where(nothing, -jnp.inf, base * (1 / LOG2E) + jnp.log(jnp.where(nothing, 1.0, total)))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result_s.at[pl.ds(0, rows)], out_g.at[pair])
    plgpu.copy_smem_to_gmem(l_s.at[0, pl.ds(0, rows)], lse_g.at[pair])
    plgpu.wait_smem_to_gmem(0)


def merge(partial, partial_lse, work: Work, sinks, config: Config, *, out_dtype, interpret=None):
    """Joins segments: out [S*K, rows, H] in out_dtype and natural log-sum-exp [S*K, rows] float32.

    Args:
      sinks: [K, 64] learned sink logits in base 2 of the rows of each kv head; -inf where there are none.
    """
    pairs, depth, h = work.of_pair.shape[0] - 1, 2, config.head_dim
    kernel = plgpu.kernel(
        functools.partial(_merge, config=config, depth=depth),
        out_type=(
            jax.ShapeDtypeStruct((pairs, config.rows, h), out_dtype),
            jax.ShapeDtypeStruct((pairs, config.rows), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((depth, ROWS, h), jnp.float32),
            plgpu.SMEM((depth, ROWS), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS, h), out_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=depth),
            plgpu.Barrier(num_arrivals=1),
        ),
        grid=(pairs,),
        grid_names=("pair",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(partial, partial_lse, work.of_pair, sinks)
