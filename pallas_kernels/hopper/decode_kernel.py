"""Ragged paged attention for Hopper, in Mosaic GPU: few queries to a row, many keys. Bound by memory.

Each block of threads is one warpgroup that walks its stretch of the work list (`work`). Several of them fit a
multiprocessor, so that one computes while another waits. Where the output is too wide for one warpgroup's registers,
two of them score the same keys and sum half of the values' columns each; both K and V are stored as two halves. Up
to 16 queries x query heads of a group swap the operands of the products: their turns are in `decode_swapped`. The turns
of more, per piece of 64 tokens:

    TMA, one box per unit     K [64, H], V [64, H] into one of `stages` buffers, asked for `stages` pieces ahead
    wgmma 64 x 64 x H         scores: rows are queries x query heads of the group, padded to 64
    registers                 soft cap, mask (pieces that need one), online softmax in base 2
    wgmma 64 x H x 64         weights as bf16 or f16, times V; pieces are summed in float32 outside of the wgmma

Keys and values in 8 or 4 bits are widened, K and then V, into one tile that the wgmmas read: see `quantised`.

The whole pool comes in with the index of the layer: a slice of it would be a copy. A stretch that begins or ends inside
a (query tile, kv head) pair leaves a partial result; `merge` joins a pair's results by their log-sum-exp. A pair in one
piece has its final result from here.

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
from pallas_kernels.hopper import decode_swapped
from pallas_kernels.hopper import quantised as narrow
from pallas_kernels.hopper.common import LOG2E, ROWS, Config, int32, launch, layout
from pallas_kernels.hopper.decode_warpgroup import Place, Refs, Stored, Warpgroup, store_segment
from pallas_kernels.patterns import FAR, Pattern
from pallas_kernels.work import DIRTY, HEAD, MASK, NUM_PIECES, PIECE, REPOSITIONED, TILE, TILE_KV, Work, unit_tokens


def _attend_stretch(*refs, config: Config, plain: bool) -> None:
    """The kernel: one block of threads walks its segments, `stages` pieces ahead of itself."""
    arrays = Refs(*refs)
    group = lax.axis_index("group") if config.warpgroups > 1 else 0
    leads = group == 0
    worker = lax.axis_index("index")
    layer = arrays.numbers_g[len(Pattern._fields)]
    first, until = arrays.first_g[worker], arrays.first_g[worker + 1]
    warpgroup = Warpgroup(arrays, config, plain, group, leads, layer, until)

    @pl.when(leads & (first < until))
    def _():
        if config.rows < ROWS and not config.swapped:
            arrays.q_s[0] = jnp.zeros(arrays.q_s.shape[1:], arrays.q_s.dtype)
            if config.num_sink_queries:
                arrays.q_sink_s[0] = jnp.zeros(arrays.q_sink_s.shape[1:], arrays.q_sink_s.dtype)
            plgpu.commit_smem()
        warpgroup.fetch_queries(first)

    ahead = warpgroup.ahead(first, arrays.segments_g[jnp.minimum(first, warpgroup.last_segment), PIECE])
    for stage in range(config.stages):

        @pl.when(leads & (ahead.segment < until))
        def _(ahead=ahead, stage=stage):
            for which in (0, 1):
                warpgroup.fetch(ahead, int32(stage), which)

        ahead = warpgroup.after(ahead)

    attend_segment = decode_swapped.attend_segment if config.swapped else _attend_segment
    lax.fori_loop(first, until, functools.partial(attend_segment, warpgroup), (int32(0), ahead))
    plgpu.wait_smem_to_gmem(0)


def _attend_segment(warpgroup: Warpgroup, segment, carry):
    """Attends the pieces of one segment and stores its partial result. carry: pieces seen, the next one to request."""
    refs, config = warpgroup.refs, warpgroup.config
    tile, begin, count = (refs.segments_g[segment, i] for i in (TILE, PIECE, NUM_PIECES))
    plgpu.barrier_wait(refs.q_bar)
    state = (
        (jnp.zeros((ROWS, config.columns), jnp.float32),) * (config.width // config.columns),
        jnp.full((ROWS,), -jnp.inf, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
        *carry,
    )
    attend_piece = functools.partial(_attend_piece, warpgroup, segment, tile, begin)
    acc, top, total, *carry = lax.fori_loop(0, count, attend_piece, state)
    pl.when(warpgroup.leads & (segment + 1 < warpgroup.until))(lambda: warpgroup.fetch_queries(segment + 1))
    store_segment(warpgroup, segment, top, total, refs.sinks_g, functools.partial(_store, warpgroup, acc))
    return tuple(carry)


def _attend_piece(warpgroup: Warpgroup, segment, tile, begin, i, carry):
    """One turn of the online softmax: 64 keys and values."""
    refs, config = warpgroup.refs, warpgroup.config
    acc, top, total, n, ahead = carry
    stage = lax.rem(n, int32(config.stages))

    def place(tile=tile, begin=begin):
        if config.scarce_registers:  # read again where it is needed, and not kept
            tile, begin = refs.segments_g[segment, TILE], refs.segments_g[segment, PIECE]
        care = refs.care_g[tile, begin + i]
        return Place(segment, tile, lambda: begin + i, stage, care, care >> 3)

    at = place()
    more = warpgroup.leads & (ahead.segment < warpgroup.until)
    plgpu.barrier_wait(refs.k_bar.at[stage])

    def refill(which):
        warpgroup.all_have_read((refs.k_read, refs.v_read)[which].at[stage])
        pl.when(more)(lambda: warpgroup.fetch(ahead, stage, which))

    if warpgroup.quantised:
        plgpu.commit_smem()  # a barrier: all warps have read the last piece's values
        warpgroup.widen(0, stage)
        warpgroup.wide_written_or_read()
    s = _scores(warpgroup, at, refs.q_s, at.zero)
    masked, capped = functools.partial(_masked, warpgroup, at), functools.partial(_capped, warpgroup, at)
    s = lax.cond(at.care & MASK != 0, masked, capped, s)
    if warpgroup.quantised:  # threads have read the scales, which a copy is to overwrite
        plgpu.commit_smem()
    refill(0)

    new_top = jnp.maximum(top, s.max(axis=1))
    # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp2(top - base)
    p = jnp.exp2(s - lax.broadcast_in_dim(base, s.shape, [0]))
    total = total * fade + p.sum(axis=1)
    more_values = _weighted_values(warpgroup, place() if config.scarce_registers else at, p, refill)
    acc = tuple(a * lax.broadcast_in_dim(fade, a.shape, [0]) + b for a, b in zip(acc, more_values))
    return acc, new_top, total, n + 1, warpgroup.after(ahead)


def _scores(warpgroup: Warpgroup, at: Place, queries, zero):
    """Products [64, 64] of queries in shared memory with a piece's keys."""
    refs, config = warpgroup.refs, warpgroup.config

    def product(acc_ref):
        keys = refs.wide_s if warpgroup.quantised else refs.k_s.at[at.stage]
        for j in range(config.warpgroups):
            part = queries.at[zero, :, pl.ds(j * config.width, config.width)]
            plgpu.wgmma(acc_ref, part, keys.at[zero + j].transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, TILE_KV), jnp.float32))


def _capped(warpgroup: Warpgroup, at: Place, s):
    """Scores with scales of the keys and soft cap, in base 2."""
    config = warpgroup.config
    factor = LOG2E if config.soft_cap is None else 1 / config.soft_cap
    if warpgroup.by_token:
        scales = narrow.scales(warpgroup.refs.scales_s.at[0, at.stage], config.unit)
        factor = lax.broadcast_in_dim(scales * factor, s.shape, [1])
    s = s * factor
    return s if config.soft_cap is None else jnp.tanh(s) * (config.soft_cap * LOG2E)


def _masked(warpgroup: Warpgroup, at: Place, s):
    """`_capped` scores with repositioned sinks scored again, -inf where a query does not see a key."""
    if warpgroup.config.num_sink_queries:
        with_sinks = functools.partial(_with_sinks, warpgroup, at)
        s = lax.cond(at.care & REPOSITIONED != 0, with_sinks, lambda s: s, s)
    visible = mask.visible(warpgroup.pattern(), *warpgroup.positions(at))
    return jnp.where(visible, _capped(warpgroup, at, s), -jnp.inf)


def _with_sinks(warpgroup: Warpgroup, at: Place, s):
    """Scores of repositioned sinks by the queries for them, others as they are."""
    refs, config = warpgroup.refs, warpgroup.config
    # StreamingLLM has one such query for all sinks.
    count = jnp.where(warpgroup.pattern().sink_position == 1, 1, config.num_sink_queries)

    def with_sink(j, s):
        pair = at.tile * config.num_kv_heads + refs.segments_g[at.segment, HEAD]

        @pl.when(warpgroup.leads)
        def _():
            to = refs.q_sink_s.at[0, pl.ds(0, config.rows)]
            plgpu.copy_gmem_to_smem(refs.q_sink_g.at[pair, j], to, refs.sink_bar)

        plgpu.barrier_wait(refs.sink_bar)
        # care is read again, lest numbers be kept through this loop.
        other = _scores(warpgroup, at, refs.q_sink_s, refs.care_g[at.tile, at.piece()] >> 3)
        warpgroup.all_have_read(refs.sink_read)
        q_pos, kv_pos = warpgroup.positions(at)
        # Only the columns of this query's sinks; FAR is no sink.
        kv_pos = jnp.where((kv_pos == j) | (j == count - 1) & (kv_pos > j), kv_pos, FAR)
        return jnp.where(mask.repositioned(warpgroup.pattern(), q_pos, kv_pos), other, s)

    return lax.fori_loop(0, count, with_sink, s)


def _weighted_values(warpgroup: Warpgroup, at: Place, p, refill):
    """Weights p [64, 64] times a piece's values: this warpgroup's columns. refill: asks for the values after them."""
    refs, config, group, stage = warpgroup.refs, warpgroup.config, warpgroup.group, at.stage
    dirty = at.care & DIRTY != 0

    def written(shape):
        return lax.broadcast_in_dim(warpgroup.key_positions(at), shape, [0]) <= refs.newest_g[at.tile]

    unit_weight = None
    if warpgroup.quantised:
        plgpu.barrier_wait(refs.v_bar.at[stage])
    if warpgroup.by_token:
        scales = narrow.scales(refs.scales_s.at[1, stage], config.unit)
        scales = lax.cond(dirty, lambda x: jnp.where(written(x.shape), x, 0.0), lambda x: x, scales)
        p, unit_weight = narrow.weighted(p, scales, config.dtype)
    values_s = refs.wide_s.at[at.zero + group] if warpgroup.quantised else refs.v_s.at[stage, group]
    refs.p_s[group] = p.astype(config.dtype)
    plgpu.commit_smem()
    if warpgroup.quantised:  # and all warps have read the keys
        warpgroup.wide_written_or_read()
        warpgroup.widen(1, stage)
    else:
        plgpu.barrier_wait(refs.v_bar.at[stage])

    if config.codes != jnp.int8:

        @pl.when(dirty)
        def _():
            # A weight of 0 does not silence a NaN in an unwritten slot.
            v = values_s[...]
            values_s[...] = jnp.where(written(v.shape), v, jnp.zeros_like(v))
            plgpu.commit_smem()

    def product(*acc_refs):
        for i, ref in enumerate(acc_refs):
            columns = pl.ds(i * config.columns, config.columns)
            plgpu.wgmma(ref, refs.p_s.at[at.zero + group], values_s.at[:, columns])
        return tuple(ref[...] for ref in acc_refs)

    sums = plgpu.WGMMAAccumulatorRef((ROWS, config.columns), jnp.float32)
    if warpgroup.quantised:
        refill(1)
    values = pl.run_scoped(product, *[sums] * (config.width // config.columns))
    if not warpgroup.quantised:
        refill(1)
    if unit_weight is not None:
        values = tuple(x * lax.broadcast_in_dim(unit_weight, x.shape, [0]) for x in values)
    return values


def _store(warpgroup: Warpgroup, acc, scale, lse, to: Stored) -> None:
    """Stores a segment's result, scaled, and its log-sum-exp."""

    @pl.when(warpgroup.leads)
    def _():
        to.lse_g[to.index] = lse

    _store_columns(warpgroup, acc, scale, to.staged_s, to.out_g.at[to.index])


def _store_columns(warpgroup: Warpgroup, acc, scale, staged_s, to_g) -> None:
    """Stores scaled rows through staged_s [W, 64, columns] to the first ones of to_g [rows, H]."""
    config, group, staged = warpgroup.config, warpgroup.group, staged_s.shape[2]
    scale = lax.broadcast_in_dim(scale, acc[0].shape, [0])
    for i in range(0, config.width, staged):
        start = i % config.columns
        x = (acc[i // config.columns] * scale)[:, start : start + staged]
        staged_s[group] = x.astype(staged_s.dtype)
        plgpu.commit_smem()
        part = to_g.at[:, pl.ds(group * config.width + i, staged)]
        plgpu.copy_smem_to_gmem(staged_s.at[group, pl.ds(0, to_g.shape[0])], part)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def attend_segments(q, q_sink, positions, pool: Pool, work: Work, sinks, numbers, config: Config, out_type, interpret):
    """Attention of each segment.

    Args:
      q: [S*K, rows, H], or with fewer rows (`Tiles.pack_queries`); q_sink: [S*K, J, rows, H] or None.
      positions: [S, 64] of the rows; [S, rows] where swapped.
      sinks: [K, 64] learned sink logits in base 2 of the rows of each kv head; None without.
      numbers: from `numbers_of`.
      out_type: shape [S*K, R, H] and dtype of the result, R <= rows.

    Returns:
      [N, rows, H] float32 and [N, 64]: results, normalised, and log2-sum-exp of segments of pairs with several. Then
      of `out_type` and [S*K, 64]: results and natural log-sum-exp of pairs with one segment. All else is not written.
    """
    size, h, n = unit_tokens(config.block_size), config.head_dim, work.segments.shape[0]
    groups, stages, width = config.warpgroups, config.stages, config.width
    tiles = layout(width, 2)  # the same of all that is multiplied
    num_queries = config.rows if config.swapped else ROWS
    matrix = plgpu.SMEM((1, num_queries, h), config.dtype, transforms=tiles)
    codes = layout(width, 0.5 if pool.kv.dtype == jnp.int4 else pool.kv.dtype.itemsize)
    buffers = plgpu.SMEM((stages, groups, TILE_KV, width), pool.kv.dtype, transforms=codes)
    arrivals = TILE_KV // size * (groups + (config.codes is not None))
    arrived = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    units = pool.kv.reshape(-1, size, h)
    scales = None if pool.scales is None else pool.scales.reshape(len(units), *narrow.scales_shape(units))
    staged = None, None
    if not config.swapped:
        staged = (
            plgpu.SMEM((groups, ROWS, config.staged), jnp.float32, transforms=layout(config.staged, 4)),
            # At most as wide as a swizzle atom, 128 bytes. Where fewer than 8 rows are copied, Mosaic GPU tiles by that
            # many; a second tile of columns would begin inside an atom, and its stores, which swizzle relative to the
            # tile, would disagree with the TMA engine, which swizzles by absolute address.
            plgpu.SMEM((groups, ROWS, config.staged * 4 // out_type.dtype.itemsize), out_type.dtype),
        )
    kernel = launch(
        "hopper_attention",
        functools.partial(_attend_stretch, config=config, plain=bool(interpret)),
        (config.num_workers,),
        out_type=(
            jax.ShapeDtypeStruct((n, config.rows, h), jnp.float32),
            jax.ShapeDtypeStruct((n, ROWS), jnp.float32),
            out_type,
            jax.ShapeDtypeStruct((out_type.shape[0], ROWS), jnp.float32),
        ),
        scratch_types=(
            matrix,
            matrix if config.num_sink_queries else None,
            buffers,
            buffers,
            None if scales is None else plgpu.SMEM((2, stages, *narrow.held(scales.shape[1:])), scales.dtype),
            plgpu.SMEM((groups, TILE_KV, width), config.dtype, transforms=tiles) if config.codes else None,
            plgpu.SMEM((groups, num_queries, TILE_KV), config.dtype, transforms=tiles),
            *staged,
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
        # One entry for each thread of 4 warps, for a maximum over 64 rows.
        reduction_bytes=128 * config.rows if config.swapped else 0,
        auto_barriers=not config.swapped,
    )
    return kernel(
        q,
        q_sink,
        units,
        scales,
        work.units,
        work.starts,
        work.care,
        positions,
        work.newest,
        work.segments,
        work.first,
        work.of_pair,
        sinks,
        numbers,
    )
