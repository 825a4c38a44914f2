"""Ragged paged attention for Hopper, in Mosaic GPU: few queries to a row, many keys. Bound by memory.

Each block of threads is one warpgroup that walks its stretch of the work list (`work`). Two of them fit a
multiprocessor, so that one computes while the other waits. Where the output is too wide for one warpgroup's registers,
two of them score the same keys and sum half of the values' columns each; both K and V lie in memory as two halves. Per
piece of 64 tokens:

    TMA, one box per unit     K [64, H], V [64, H] into one of `stages` buffers, asked for `stages` pieces ahead
    wgmma 64 x 64 x H         scores: rows are queries x query heads of the group, padded to 64
    registers                 soft cap, mask (pieces that need one), online softmax in base 2
    wgmma 64 x H x 64         weights as bf16 or f16, times V; pieces are summed in float32 outside of the wgmma

Keys and values in 8 or 4 bits are widened, K and then V, into one tile that the wgmmas read: see `quantised`.

The whole pool comes in with the index of the layer: a slice of it would be a copy. A stretch that begins or ends inside
a (query tile, kv head) pair leaves a partial result; `merge` joins those of a pair by their log-sum-exp.

Source: online softmax, FlashAttention-2, arXiv:2307.08691, algorithm 1; split keys, Flash-Decoding; one box per block
because TMA gathers need Blackwell.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Pool
from pallas_kernels.hopper import decode_mask as mask
from pallas_kernels.hopper import quantised as narrow
from pallas_kernels.hopper.common import LOG2E, ROWS, Config, int32, launch, layout, load
from pallas_kernels.patterns import FAR, Pattern
from pallas_kernels.work import DIRTY, HEAD, MASK, MOVED, NUM_PIECES, PIECE, TILE, TILE_KV, Work, unit_tokens


# _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive. _read: those at which warpgroups
# arrive when they have read what may be overwritten.
def _attend(q_g, q_sink_g, pool_g, scales_g, units_g, starts_g, care_g, positions_g, newest_g, segments_g, first_g,
            numbers_g, out_g, lse_g, q_s, q_sink_s, k_s, v_s, scales_s, wide_s, p_s, out_s, q_bar, sink_bar, k_bar,
            v_bar, wide_bar, sink_read, k_read, v_read, *, config: Config, plain: bool):  # fmt: skip
    size = unit_tokens(config.block_size)
    per_piece, parts = TILE_KV // size, config.block_size // size
    stages, kv_heads, columns, width = config.stages, config.num_kv_heads, config.columns, config.width
    together = config.warpgroups > 1
    quantised = config.codes is not None
    by_token = quantised and config.codes != jnp.int4  # scales multiply scores and weights
    group = lax.axis_index("group") if together else 0
    leads = group == 0
    worker = lax.axis_index("index")
    layer = numbers_g[len(Pattern._fields)]
    first, until = first_g[worker], first_g[worker + 1]

    def pattern():  # read where it is used, and not kept: registers are scarce
        return Pattern(*(numbers_g[i] for i in range(len(Pattern._fields))))

    def fetch(segment, piece, stage, which):
        """Asks for keys (0) or values (1) of one piece of a segment."""
        tile, head = segments_g[segment, TILE], segments_g[segment, HEAD]
        row = ((layer * 2 + which) * kv_heads + head) * parts
        for i in range(per_piece):
            unit, slots = units_g[tile, piece * per_piece + i] + row, pl.ds(i * size, size)
            if quantised:
                part = narrow.place(scales_s.at[which, stage], i, size)
                plgpu.copy_gmem_to_smem(scales_g.at[unit], part, (k_bar, v_bar)[which].at[stage])
            for j in range(config.warpgroups):
                part = pool_g.at[unit, :, pl.ds(j * width, width)]
                plgpu.copy_gmem_to_smem(part, (k_s, v_s)[which].at[stage, j, slots], (k_bar, v_bar)[which].at[stage])

    def after(segment, piece):
        """The piece after one, perhaps the first of the next segment."""
        done = piece + 1 == segments_g[segment, PIECE] + segments_g[segment, NUM_PIECES]
        following = jnp.minimum(segment + 1, segments_g.shape[0] - 1)
        return jnp.where(done, segment + 1, segment), jnp.where(done, segments_g[following, PIECE], piece + 1)

    def fetch_queries(segment):
        pair = segments_g[segment, TILE] * kv_heads + segments_g[segment, HEAD]
        plgpu.copy_gmem_to_smem(q_g.at[pair], q_s.at[0, pl.ds(0, config.rows)], q_bar)

    def all_have_read(barrier):
        """Waits, where this warpgroup leads, until all of them are here."""
        if together:
            plgpu.barrier_arrive(barrier)
            pl.when(leads)(lambda: plgpu.barrier_wait(barrier))

    def widen(which, stage):
        """Writes this warpgroup's columns of keys (0) or values (1) in 16 bits."""
        x = narrow.widened((k_s, v_s)[which][stage, group], config.dtype, plain)
        narrow.write(wide_s.at[group], x, scales_s.at[which, stage], which, group * width)
        plgpu.commit_smem()

    def wide_written_or_read():
        """Waits until all warpgroups are here: their parts of the widened keys are read by all of them."""
        if together:
            plgpu.barrier_arrive(wide_bar)
            plgpu.barrier_wait(wide_bar)

    @pl.when(leads & (first < until))
    def _():
        if config.rows < ROWS:
            q_s[0] = jnp.zeros(q_s.shape[1:], q_s.dtype)
            if config.num_sink_queries:
                q_sink_s[0] = jnp.zeros(q_sink_s.shape[1:], q_sink_s.dtype)
            plgpu.commit_smem()
        fetch_queries(first)

    ahead = (first, segments_g[jnp.minimum(first, segments_g.shape[0] - 1), PIECE])
    for stage in range(stages):

        @pl.when(leads & (ahead[0] < until))
        def _(ahead=ahead, stage=stage):
            for which in (0, 1):
                fetch(*ahead, int32(stage), which)

        ahead = after(jnp.minimum(ahead[0], segments_g.shape[0] - 1), ahead[1])

    def attend_segment(segment, carry):
        tile, begin, count = (segments_g[segment, i] for i in (TILE, PIECE, NUM_PIECES))
        plgpu.barrier_wait(q_bar)

        def attend_piece(i, carry):
            acc, top, total, n, ahead_segment, ahead_piece = carry
            stage = lax.rem(n, int32(stages))
            care = care_g[tile, begin + i]
            # Its three bits shifted out: 0, which no compiler knows. So it computes where a wgmma's operands lie just
            # before, instead of keeping all these numbers in 50 registers.
            zero = care >> 3
            more = leads & (ahead_segment < until)
            plgpu.barrier_wait(k_bar.at[stage])

            if quantised:
                plgpu.commit_smem()  # a barrier: all warps have read the last piece's values
                widen(0, stage)
                wide_written_or_read()

            def scores_of(acc_ref, queries=q_s, zero=zero):
                keys = wide_s if quantised else k_s.at[stage]
                for j in range(config.warpgroups):
                    part = queries.at[zero, :, pl.ds(j * width, width)]
                    plgpu.wgmma(acc_ref, part, keys.at[zero + j].transpose((1, 0)))
                return acc_ref[...]

            scores = plgpu.WGMMAAccumulatorRef((ROWS, TILE_KV), jnp.float32)
            s = pl.run_scoped(scores_of, scores)

            def unit_starts():
                return [starts_g[tile, (begin + i) * per_piece + j] for j in range(per_piece)]

            def positions():
                return load(positions_g, tile), mask.key_positions(unit_starts(), size)

            def with_sink(j, s, num_second):
                pair = tile * kv_heads + segments_g[segment, HEAD]

                @pl.when(leads)
                def _():
                    plgpu.copy_gmem_to_smem(q_sink_g.at[pair, j], q_sink_s.at[0, pl.ds(0, config.rows)], sink_bar)

                plgpu.barrier_wait(sink_bar)
                # care is read anew, lest numbers be kept through this loop.
                other_scores = functools.partial(scores_of, queries=q_sink_s, zero=care_g[tile, begin + i] >> 3)
                other = pl.run_scoped(other_scores, scores)
                all_have_read(sink_read)
                q_pos, kv_pos = positions()
                # Only the columns of this query's sinks; FAR is never moved.
                kv_pos = jnp.where((kv_pos == j) | (j == num_second - 1) & (kv_pos > j), kv_pos, FAR)
                return jnp.where(mask.moved(pattern(), q_pos, kv_pos), other, s)

            def with_sinks(s):
                # StreamingLLM has one second query for all sinks.
                num_second = jnp.where(pattern().sink_moved == 1, 1, config.num_sink_queries)
                return lax.fori_loop(0, num_second, functools.partial(with_sink, num_second=num_second), s)

            def capped(s):  # and in base 2
                factor = LOG2E if config.soft_cap is None else 1 / config.soft_cap
                if by_token:
                    factor = lax.broadcast_in_dim(narrow.scales(scales_s.at[0, stage], size) * factor, s.shape, [1])
                s = s * factor
                return s if config.soft_cap is None else jnp.tanh(s) * (config.soft_cap * LOG2E)

            def masked(s):
                if config.num_sink_queries:
                    s = lax.cond(care & MOVED != 0, with_sinks, lambda s: s, s)
                return jnp.where(mask.visible(pattern(), *positions()), capped(s), -jnp.inf)

            s = lax.cond(care & MASK != 0, masked, capped, s)

            def refill(which):
                all_have_read((k_read, v_read)[which].at[stage])
                pl.when(more)(lambda: fetch(ahead_segment, ahead_piece, stage, which))

            if quantised:  # threads have read the scales, which a copy is to overwrite
                plgpu.commit_smem()
            refill(0)

            new_top = jnp.maximum(top, s.max(axis=1))
            # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            fade = jnp.exp2(top - base)
            p = jnp.exp2(s - lax.broadcast_in_dim(base, s.shape, [0]))
            total = total * fade + p.sum(axis=1)
            dirty = care & DIRTY != 0

            def written(shape):
                kv_pos = mask.key_positions(unit_starts(), size)
                return lax.broadcast_in_dim(kv_pos, shape, [0]) <= newest_g[tile]

            unit_weight = None
            if quantised:
                plgpu.barrier_wait(v_bar.at[stage])
            if by_token:
                value_scales = narrow.scales(scales_s.at[1, stage], size)
                value_scales = lax.cond(dirty, lambda x: jnp.where(written(x.shape), x, 0.0), lambda x: x, value_scales)
                p, unit_weight = narrow.weighted(p, value_scales, config.dtype)
            values_s = wide_s.at[zero + group] if quantised else v_s.at[stage, group]
            p_s[group] = p.astype(config.dtype)
            plgpu.commit_smem()
            if quantised:  # and all warps have read the keys
                wide_written_or_read()
                widen(1, stage)
            else:
                plgpu.barrier_wait(v_bar.at[stage])

            if config.codes != jnp.int8:

                @pl.when(dirty)
                def _():
                    # A weight of 0 does not silence a NaN in a slot that nobody has written.
                    v = values_s[...]
                    values_s[...] = jnp.where(written(v.shape), v, jnp.zeros_like(v))
                    plgpu.commit_smem()

            def values_of(*refs):
                for i, ref in enumerate(refs):
                    plgpu.wgmma(ref, p_s.at[zero + group], values_s.at[:, pl.ds(i * columns, columns)])
                return tuple(ref[...] for ref in refs)

            sums = [plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32)] * len(acc)
            if quantised:
                refill(1)
            more_values = pl.run_scoped(values_of, *sums)
            if not quantised:
                refill(1)
            if unit_weight is not None:
                more_values = tuple(x * lax.broadcast_in_dim(unit_weight, x.shape, [0]) for x in more_values)
            acc = tuple(a * lax.broadcast_in_dim(fade, a.shape, [0]) + b for a, b in zip(acc, more_values))
            ahead_segment, ahead_piece = after(jnp.minimum(ahead_segment, segments_g.shape[0] - 1), ahead_piece)
            return acc, new_top, total, n + 1, ahead_segment, ahead_piece

        state = (
            (jnp.zeros((ROWS, columns), jnp.float32),) * (width // columns),
            jnp.full((ROWS,), -jnp.inf, jnp.float32),
            jnp.zeros((ROWS,), jnp.float32),
            *carry,
        )
        acc, top, total, *carry = lax.fori_loop(0, count, attend_piece, state)

        pl.when(leads & (segment + 1 < until))(lambda: fetch_queries(segment + 1))

        nothing = total == 0.0
        scale = lax.broadcast_in_dim(1.0 / jnp.where(nothing, 1.0, total), acc[0].shape, [0])

        @pl.when(leads)
        def _():
            lse_g[segment] = jnp.where(nothing, -jnp.inf, top + jnp.log(jnp.where(nothing, 1.0, total)) * LOG2E)

        staged = out_s.shape[2]
        for i in range(0, width, staged):
            out_s[group] = (acc[i // columns] * scale)[:, i % columns : i % columns + staged]
            plgpu.commit_smem()
            part = out_g.at[segment, group, :, pl.ds(i, staged)]
            plgpu.copy_smem_to_gmem(out_s.at[group, pl.ds(0, config.rows)], part)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return tuple(carry)

    lax.fori_loop(first, until, attend_segment, (int32(0), *ahead))
    plgpu.wait_smem_to_gmem(0)


def attend_segments(q, q_sink, positions, pool: Pool, work: Work, numbers, config: Config, interpret):
    """Partial attention of each segment: out [N, W, rows, H / W] float32 of W warpgroups and log2-sum-exp [N, 64].

    Args:
      q: [S*K, rows, H]; q_sink: [S*K, J, rows, H] or None. positions: [S, 64] of the rows.
      numbers: from `numbers_of`.
    """
    size, h, n = unit_tokens(config.block_size), config.head_dim, work.segments.shape[0]
    groups, stages, width = config.warpgroups, config.stages, config.width
    tiles = layout(width, 2)  # the same of all that is multiplied
    matrix = plgpu.SMEM((1, ROWS, h), config.dtype, transforms=tiles)
    codes = layout(width, 0.5 if pool.kv.dtype == jnp.int4 else pool.kv.dtype.itemsize)
    buffers = plgpu.SMEM((stages, groups, TILE_KV, width), pool.kv.dtype, transforms=codes)
    arrivals = TILE_KV // size * (groups + (config.codes is not None))
    arrived = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    units = pool.kv.reshape(-1, size, h)
    scales = None if pool.scales is None else pool.scales.reshape(len(units), *narrow.scales_shape(units))
    kernel = launch(
        "hopper_attention",
        functools.partial(_attend, config=config, plain=bool(interpret)),
        (config.num_workers,),
        out_type=(
            jax.ShapeDtypeStruct((n, groups, config.rows, width), jnp.float32),
            jax.ShapeDtypeStruct((n, ROWS), jnp.float32),
        ),
        scratch_types=(
            matrix,
            matrix if config.num_sink_queries else None,
            buffers,
            buffers,
            None if scales is None else plgpu.SMEM((2, stages, *narrow.held(scales.shape[1:])), scales.dtype),
            plgpu.SMEM((groups, TILE_KV, width), config.dtype, transforms=tiles) if config.codes else None,
            plgpu.SMEM((groups, ROWS, TILE_KV), config.dtype, transforms=tiles),
            plgpu.SMEM((groups, ROWS, config.staged), jnp.float32, transforms=layout(config.staged, 4)),
            plgpu.Barrier(),
            plgpu.Barrier(),
            arrived,
            arrived,
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        ),
        interpret=interpret,
        warpgroups=groups,
    )
    return kernel(
        q, q_sink, units, scales, work.units, work.starts, work.care, positions, work.newest, work.segments, work.first,
        numbers,
    )  # fmt: skip
