"""The attention weight that each slot got, for Hopper, in Mosaic GPU: what H2O and its like add up. Bound by memory.

Reads keys only, along the work list of the attention, after it: its log-sum-exp makes weights of scores, so
that nothing has to be merged. Each block of threads is one warpgroup; two of them fit a multiprocessor. Per piece of 64
tokens:

    TMA, one box per unit    K [64, H] into one of `stages` buffers, asked for `stages` pieces ahead
    wgmma 64 x rows x H      scores the other way round, so that as few columns as there are queries are computed
    registers                soft cap, mask (pieces that need one), exp2(score - lse), summed along a row
    store                    [64] float32 to the piece's own place

Source: heavy hitters, arXiv:2306.14048, section 4.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Call, check_options
from pallas_kernels.hopper.common import LOG2E, Config, check_heads, int32, launch, layout, load, numbers_of
from pallas_kernels.hopper.decode_mask import key_positions
from pallas_kernels.hopper.schedule import Tuning, schedule
from pallas_kernels.hopper.tiles import Tiles
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import HEAD, MASK, MOVED, NUM_PIECES, PIECE, TILE, TILE_KV, Work, unit_tokens


# _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive.
def _weigh(q_g, q_sink_g, lse_g, positions_g, pool_g, units_g, starts_g, care_g, segments_g, first_g, numbers_g, mass_g,
           q_s, q_sink_s, k_s, q_bar, sink_bar, k_bar, *, config: Config):  # fmt: skip
    size = unit_tokens(config.block_size)
    per_piece, parts, kv_heads = TILE_KV // size, config.block_size // size, config.num_kv_heads
    shape = (TILE_KV, config.rows)
    last_segment = segments_g.shape[0] - 1
    worker = lax.axis_index("index")
    layer = numbers_g[len(Pattern._fields)]
    first, until = first_g[worker], first_g[worker + 1]

    def fetch(place, stage):
        """Asks for the keys of one piece of a segment, and gives the piece after it, perhaps of the next segment."""
        segment, piece = place
        tile, head, begin, count = (segments_g[segment, i] for i in (TILE, HEAD, PIECE, NUM_PIECES))
        row = (layer * 2 * kv_heads + head) * parts
        for i in range(per_piece):
            unit = units_g[tile, piece * per_piece + i] + row
            plgpu.copy_gmem_to_smem(pool_g.at[unit], k_s.at[stage, pl.ds(i * size, size)], k_bar.at[stage])
        done = piece + 1 == begin + count
        following = jnp.minimum(segment + 1, last_segment)
        return jnp.where(done, segment + 1, segment), jnp.where(done, segments_g[following, PIECE], piece + 1)

    def fetch_if_any(ahead, stage):
        return lax.cond(ahead[0] < until, lambda: fetch(ahead, stage), lambda: ahead)

    def fetch_queries(segment):
        pair = segments_g[segment, TILE] * kv_heads + segments_g[segment, HEAD]
        plgpu.copy_gmem_to_smem(q_g.at[pair], q_s, q_bar)

    pl.when(first < until)(lambda: fetch_queries(first))
    ahead = (first, segments_g[jnp.minimum(first, last_segment), PIECE])
    ahead = lax.fori_loop(0, config.stages, lambda stage, ahead: fetch_if_any(ahead, stage), ahead)

    def weigh_segment(segment, carry):
        tile, head, begin, count = (segments_g[segment, i] for i in (TILE, HEAD, PIECE, NUM_PIECES))
        pair = tile * kv_heads + head
        lse = load(lse_g, pair)
        plgpu.barrier_wait(q_bar)

        def weigh_piece(i, carry):
            n, ahead = carry
            stage = lax.rem(n, int32(config.stages))
            plgpu.barrier_wait(k_bar.at[stage])

            def scores_of(queries):
                def product(acc_ref):
                    plgpu.wgmma(acc_ref, k_s.at[stage], queries.transpose((1, 0)))
                    return acc_ref[...]

                return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

            def capped(s):  # and in base 2
                if config.soft_cap is None:
                    return s * LOG2E
                return jnp.tanh(s * (1 / config.soft_cap)) * (config.soft_cap * LOG2E)

            def pattern_and_positions():
                unit_starts = [starts_g[tile, (begin + i) * per_piece + j] for j in range(per_piece)]
                kv_pos = lax.broadcast_in_dim(key_positions(unit_starts, size), shape, [0])
                q_pos = lax.broadcast_in_dim(load(positions_g, pair), shape, [1])
                return Pattern(*(numbers_g[i] for i in range(len(Pattern._fields)))), q_pos, kv_pos

            def with_sink(j, s):
                plgpu.copy_gmem_to_smem(q_sink_g.at[pair, j], q_sink_s, sink_bar)
                pattern, q_pos, kv_pos = pattern_and_positions()
                here = pattern.moved(q_pos, kv_pos) & (jnp.minimum(kv_pos, config.num_sink_queries - 1) == j)
                plgpu.barrier_wait(sink_bar)
                return jnp.where(here, scores_of(q_sink_s), s)

            def masked(s):
                if config.num_sink_queries:
                    with_sinks = functools.partial(lax.fori_loop, 0, config.num_sink_queries, with_sink)
                    s = lax.cond(care & MOVED != 0, with_sinks, lambda s: s, s)
                pattern, q_pos, kv_pos = pattern_and_positions()
                return jnp.where(pattern.visible(q_pos, kv_pos), capped(s), -jnp.inf)

            care = care_g[tile, begin + i]
            s = lax.cond(care & MASK != 0, masked, capped, scores_of(q_s))
            ahead = fetch_if_any(ahead, stage)
            mass_g[pair, begin + i] = jnp.exp2(s - lax.broadcast_in_dim(lse, shape, [1])).sum(axis=1)
            return n + 1, ahead

        carry = lax.fori_loop(0, count, weigh_piece, carry)
        pl.when(segment + 1 < until)(lambda: fetch_queries(segment + 1))
        return carry

    lax.fori_loop(first, until, weigh_segment, (int32(0), ahead))


# Under jit of its own, so that all layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames="tuning")
def probability_mass(call: Call, lse: jax.Array, work: Work | None = None, *, tuning: Tuning) -> jax.Array:
    """The attention weight that each slot got, `Result.mass`, for a call that may ask for other results too.

    Args:
      lse: [S, Q, N] as the attention gives it; it holds the learned sink logits, which are not read here.
      work: from `schedule`, as the attention takes it; None makes it here.

    Raises:
      NotImplementedError: a dtype, head dim, block size, group or pool that the kernel does not support.
    """
    pool = call.pool.kv
    block_size, h = pool.shape[4:]
    check_options(call, "q_sink", "sinks", "soft_cap", "return_lse", "return_mass", "out_dtype")
    check_heads(call, (jnp.bfloat16, jnp.float16))
    tiles = Tiles.of(call)
    if work is None:
        work = schedule(call, tuning=tuning)
    config = Config(
        num_kv_heads=tiles.num_kv_heads, head_dim=h, block_size=block_size, rows=tiles.rows, dtype=pool.dtype,
        num_workers=work.first.shape[0] - 1, stages=tuning.stages or 512 // h, soft_cap=call.options.soft_cap,
        num_sink_queries=call.num_sink_queries,
    )  # fmt: skip
    # What must not count weighs exp2(score - inf).
    counts = (call.positions[:, :, None] >= 0) & (lse > -jnp.inf)
    lse = jnp.where(counts, lse * LOG2E, jnp.inf)
    positions = jnp.broadcast_to(call.positions[:, :, None], lse.shape)
    queries = plgpu.SMEM((tiles.rows, h), pool.dtype, transforms=layout(h, 2))
    kernel = launch(
        "hopper_mass",
        functools.partial(_weigh, config=config),
        (config.num_workers,),
        out_type=jax.ShapeDtypeStruct((len(work.units) * tiles.num_kv_heads, work.care.shape[1], TILE_KV), jnp.float32),
        scratch_types=(
            queries,
            queries if config.num_sink_queries else None,
            plgpu.SMEM((config.stages, TILE_KV, h), pool.dtype, transforms=layout(h, 2)),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=TILE_KV // unit_tokens(block_size), num_barriers=config.stages),
        ),
        interpret=tuning.interpret,
    )
    mass = kernel(
        tiles.pack(call.q.astype(pool.dtype)), tiles.pack_sink_queries(call.options.q_sink, pool.dtype),
        tiles.pack(lse, jnp.inf), tiles.pack(positions, -1), pool.reshape(-1, unit_tokens(block_size), h), work.units,
        work.starts, work.care, work.segments, work.first, numbers_of(call),
    )  # fmt: skip
    return _in_table(mass, work, tiles.num_rows, tiles.num_kv_heads)


def _in_table(mass, work: Work, num_rows: int, kv_heads: int):
    """Masses [S * tiles * K, pieces, 64] of live units to all slots of the table, summed over tiles: [S, K, P * B]."""
    num_units = work.units.shape[1]
    mass = mass.reshape(len(work.units), kv_heads, num_units, -1)
    place = work.place[:, None, :, None]
    # Pieces that are not live were not written and hold anything.
    mass = jnp.where(place < num_units, jnp.take_along_axis(mass, place, axis=2, mode="clip"), 0.0)
    return mass.reshape(num_rows, -1, kv_heads, mass.shape[2] * mass.shape[3]).sum(axis=1)
