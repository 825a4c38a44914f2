"""The attention weight of each slot, as H2O and related methods sum it, for Hopper, in Mosaic GPU. Bound by memory.

Reads keys only, along the work list of the attention, after it: its log-sum-exp turns scores into weights, so
nothing is merged. Each block of threads is one warpgroup; two of them fit a multiprocessor. Per piece of 64
tokens:

    TMA, one box per unit    K [64, H] into one of `stages` buffers, asked for `stages` pieces ahead
    wgmma 64 x rows x H      scores transposed, so that only as many columns as queries are computed
    registers                soft cap, mask (pieces that need one), exp2(score - lse), summed along a row
    store                    [64] float32 to the piece's own place

Source: heavy hitters, arXiv:2306.14048, section 4.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Call, check_options
from pallas_kernels.hopper.common import (
    LOG2E,
    Config,
    check_heads,
    fetch_rows,
    int32,
    key_positions,
    launch,
    layout,
    load,
    numbers_of,
)
from pallas_kernels.hopper.schedule import Tuning, schedule
from pallas_kernels.hopper.tiles import Tiles
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import HEAD, MASK, NUM_PIECES, PIECE, REPOSITIONED, TILE, TILE_KV, Work, unit_tokens


class Refs(NamedTuple):
    """Arrays of the kernel, in its order: inputs, the output, scratch.

    _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive.
    """

    q_g: Any
    q_sink_g: Any
    lse_g: Any
    positions_g: Any
    pool_g: Any
    units_g: Any
    starts_g: Any
    care_g: Any
    segments_g: Any
    first_g: Any
    numbers_g: Any
    mass_g: Any
    q_s: Any
    q_sink_s: Any
    k_s: Any
    q_bar: Any
    sink_bar: Any
    k_bar: Any


class Piece(NamedTuple):
    """One of the keys. number: in its tile. pair: of query tile and kv head. stage: its buffer."""

    number: Any
    tile: Any
    pair: Any
    stage: Any


def _weigh_stretch(*refs, config: Config) -> None:
    """The kernel: one block of threads walks its segments, `stages` pieces ahead of itself."""
    arrays = Refs(*refs)
    worker = lax.axis_index("index")
    layer = arrays.numbers_g[len(Pattern._fields)]
    first, until = arrays.first_g[worker], arrays.first_g[worker + 1]

    def fetch_if_any(ahead, stage):
        fetch = functools.partial(_fetch, arrays, config, layer, ahead, stage)
        return lax.cond(ahead[0] < until, fetch, lambda: ahead)

    def fetch_queries(segment):
        pair = arrays.segments_g[segment, TILE] * config.num_kv_heads + arrays.segments_g[segment, HEAD]
        fetch_rows(arrays.q_g, pair, arrays.q_s, arrays.q_bar)

    def weigh_segment(segment, carry):
        tile, head, begin, count = (arrays.segments_g[segment, i] for i in (TILE, HEAD, PIECE, NUM_PIECES))
        pair = tile * config.num_kv_heads + head
        lse = load(arrays.lse_g, pair)
        plgpu.barrier_wait(arrays.q_bar)

        def weigh_piece(i, carry):
            n, ahead = carry
            stage = lax.rem(n, int32(config.stages))
            plgpu.barrier_wait(arrays.k_bar.at[stage])
            s = _scores(arrays, config, Piece(begin + i, tile, pair, stage))
            ahead = fetch_if_any(ahead, stage)
            arrays.mass_g[pair, begin + i] = jnp.exp2(s - lax.broadcast_in_dim(lse, s.shape, [1])).sum(axis=1)
            return n + 1, ahead

        carry = lax.fori_loop(0, count, weigh_piece, carry)
        pl.when(segment + 1 < until)(lambda: fetch_queries(segment + 1))
        return carry

    pl.when(first < until)(lambda: fetch_queries(first))
    ahead = (first, arrays.segments_g[jnp.minimum(first, arrays.segments_g.shape[0] - 1), PIECE])
    ahead = lax.fori_loop(0, config.stages, lambda stage, ahead: fetch_if_any(ahead, stage), ahead)
    lax.fori_loop(first, until, weigh_segment, (int32(0), ahead))


def _fetch(refs: Refs, config: Config, layer, place, stage):
    """Requests the keys of one piece of a segment, and gives the piece after it, perhaps of the next segment."""
    segment, piece = place
    tile, head, begin, count = (refs.segments_g[segment, i] for i in (TILE, HEAD, PIECE, NUM_PIECES))
    row = (layer * 2 * config.num_kv_heads + head) * config.units_of_block
    for i in range(config.units_of_piece):
        unit, slots = refs.units_g[tile, piece * config.units_of_piece + i] + row, pl.ds(i * config.unit, config.unit)
        plgpu.copy_gmem_to_smem(refs.pool_g.at[unit], refs.k_s.at[stage, slots], refs.k_bar.at[stage])
    done = piece + 1 == begin + count
    following = jnp.minimum(segment + 1, refs.segments_g.shape[0] - 1)
    return jnp.where(done, segment + 1, segment), jnp.where(done, refs.segments_g[following, PIECE], piece + 1)


def _scores(refs: Refs, config: Config, piece: Piece):
    """Scores [64, rows] of a piece's keys in base 2, with soft cap; -inf where a query does not see a key."""
    shape = (TILE_KV, config.rows)
    care = refs.care_g[piece.tile, piece.number]

    def scores_of(queries):
        def product(acc_ref):
            plgpu.wgmma(acc_ref, refs.k_s.at[piece.stage], queries.transpose((1, 0)))
            return acc_ref[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def capped(s):
        if config.soft_cap is None:
            return s * LOG2E
        return jnp.tanh(s * (1 / config.soft_cap)) * (config.soft_cap * LOG2E)

    def pattern_and_positions():
        count = config.units_of_piece
        unit_starts = [refs.starts_g[piece.tile, piece.number * count + j] for j in range(count)]
        kv_pos = lax.broadcast_in_dim(key_positions(unit_starts, config.unit), shape, [0])
        q_pos = lax.broadcast_in_dim(load(refs.positions_g, piece.pair), shape, [1])
        return Pattern(*(refs.numbers_g[i] for i in range(len(Pattern._fields)))), q_pos, kv_pos

    def with_sink(j, s):
        plgpu.copy_gmem_to_smem(refs.q_sink_g.at[piece.pair, j], refs.q_sink_s, refs.sink_bar)
        pattern, q_pos, kv_pos = pattern_and_positions()
        here = pattern.repositioned(q_pos, kv_pos) & (jnp.minimum(kv_pos, config.num_sink_queries - 1) == j)
        plgpu.barrier_wait(refs.sink_bar)
        return jnp.where(here, scores_of(refs.q_sink_s), s)

    def masked(s):
        if config.num_sink_queries:
            with_sinks = functools.partial(lax.fori_loop, 0, config.num_sink_queries, with_sink)
            s = lax.cond(care & REPOSITIONED != 0, with_sinks, lambda s: s, s)
        pattern, q_pos, kv_pos = pattern_and_positions()
        return jnp.where(pattern.visible(q_pos, kv_pos), capped(s), -jnp.inf)

    return lax.cond(care & MASK != 0, masked, capped, scores_of(refs.q_s))


# A separate jit, so that all layers of a model share one lowering.
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
    check_options(call, "q_sink", "sinks", "soft_cap", "return_lse", "return_mass", "mass_factor", "out_dtype")
    check_heads(call, (jnp.bfloat16, jnp.float16))
    tiles = Tiles.of(call)
    if work is None:
        work = schedule(call, tuning=tuning)
    config = Config(
        num_kv_heads=tiles.num_kv_heads,
        head_dim=h,
        block_size=block_size,
        rows=tiles.rows,
        dtype=pool.dtype,
        num_workers=work.num_workers(tiles.num_kv_heads),
        stages=tuning.stages or 512 // h,
        soft_cap=call.options.soft_cap,
        num_sink_queries=call.num_sink_queries,
    )
    # Queries that must not count weigh exp2(score - inf).
    counts = (call.positions[:, :, None] >= 0) & (lse > -jnp.inf)
    lse = jnp.where(counts, lse * LOG2E, jnp.inf)
    if (factor := call.options.mass_factor) is not None:
        lse = lse - jnp.log2(factor)[:, :, None]
    positions = jnp.broadcast_to(call.positions[:, :, None], lse.shape)
    mass = _kernel(config, work, tuning)(
        tiles.pack_queries(call.q.astype(pool.dtype), padded=bool(tuning.interpret)),
        tiles.pack_sink_queries(call.options.q_sink, pool.dtype),
        tiles.pack(lse, jnp.inf),
        tiles.pack(positions, -1),
        pool.reshape(-1, unit_tokens(block_size), h),
        work.units,
        work.starts,
        work.care,
        work.segments,
        work.first,
        numbers_of(call),
    )
    return _in_table(mass, work, tiles.num_rows, tiles.num_kv_heads)


def _kernel(config: Config, work: Work, tuning: Tuning):
    """The kernel for a work list: a function of the inputs in `Refs`, which gives [tiles * K, pieces, 64]."""
    h = config.head_dim
    queries = plgpu.SMEM((config.rows, h), config.dtype, transforms=layout(h, 2))
    pairs, pieces = len(work.units) * config.num_kv_heads, work.care.shape[1]
    return launch(
        "hopper_mass",
        functools.partial(_weigh_stretch, config=config),
        (config.num_workers,),
        out_type=jax.ShapeDtypeStruct((pairs, pieces, TILE_KV), jnp.float32),
        scratch_types=(
            queries,
            queries if config.num_sink_queries else None,
            plgpu.SMEM((config.stages, TILE_KV, h), config.dtype, transforms=layout(h, 2)),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=config.units_of_piece, num_barriers=config.stages),
        ),
        interpret=tuning.interpret,
    )


def _in_table(mass, work: Work, num_rows: int, kv_heads: int):
    """Masses [S * tiles * K, pieces, 64] of live units to all slots of the table, summed over tiles: [S, K, P * B]."""
    num_units = work.units.shape[1]
    mass = mass.reshape(len(work.units), kv_heads, num_units, -1)
    place = work.place[:, None, :, None]
    # Pieces that are not live were not written and are undefined.
    mass = jnp.where(place < num_units, jnp.take_along_axis(mass, place, axis=2, mode="clip"), 0.0)
    return mass.reshape(num_rows, -1, kv_heads, mass.shape[2] * mass.shape[3]).sum(axis=1)
