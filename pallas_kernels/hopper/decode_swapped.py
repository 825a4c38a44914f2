"""The turns of decode with operands swapped: keys are the 64 rows of a wgmma, queries its 8 or 16 columns.

For few queries and heads of a group. `decode_kernel` has the walk along the work list, and the same turns unswapped,
where all rows beyond the queries are padding. Per piece of 64 tokens:

    wgmma 64 x rows x H       scores: K times Q transposed; K of 8 bits is widened in registers
    registers                 soft cap, mask (pieces that need one), online softmax in base 2 down the columns
    wgmma H x rows x 64       V transposed times the weights, which are in shared memory as [rows, 64]

The sum of the weights is kept for each row of a wgmma, and summed down the columns only where a segment ends.
"""

from __future__ import annotations

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import decode_mask as mask
from pallas_kernels.hopper import quantised as narrow
from pallas_kernels.hopper import transposed
from pallas_kernels.hopper.common import LOG2E, int32, store
from pallas_kernels.hopper.decode_warpgroup import Place, Stored, Warpgroup, store_segment
from pallas_kernels.patterns import FAR
from pallas_kernels.work import DIRTY, MASK, NUM_PIECES, PIECE, REPOSITIONED, TILE, TILE_KV


def attend_segment(warpgroup: Warpgroup, segment, carry):
    """Attends the pieces of one segment and stores its result. carry: pieces seen, the next one to request."""
    refs, config = warpgroup.refs, warpgroup.config
    tile, begin, count = (refs.segments_g[segment, i] for i in (TILE, PIECE, NUM_PIECES))
    plgpu.barrier_wait(refs.q_bar)
    state = (
        jnp.zeros((config.head_dim, config.rows), jnp.float32),
        jnp.full((config.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((TILE_KV, config.rows), jnp.float32),
        *carry,
    )
    attend_piece = functools.partial(_attend_piece, warpgroup, segment, tile, begin)
    acc, top, totals, *carry = lax.fori_loop(0, count, attend_piece, state)
    pl.when(segment + 1 < warpgroup.until)(lambda: warpgroup.fetch_queries(segment + 1))
    sinks = None if refs.sinks_g is None else refs.sinks_g.at[:, pl.ds(0, config.rows)]
    store_segment(warpgroup, segment, top, totals.sum(axis=0), sinks, functools.partial(_store, warpgroup, acc))
    return tuple(carry)


def _attend_piece(warpgroup: Warpgroup, segment, tile, begin, i, carry):
    """One turn of the online softmax: 64 keys and values."""
    refs, config = warpgroup.refs, warpgroup.config
    acc, top, totals, n, ahead = carry
    stage = lax.rem(n, int32(config.stages))
    care = refs.care_g[tile, begin + i]
    at = Place(segment, tile, lambda: begin + i, stage, care, care >> 3)
    more = ahead.segment < warpgroup.until
    plgpu.barrier_wait(refs.k_bar.at[stage])

    def refill(which):
        pl.when(more)(lambda: warpgroup.fetch(ahead, stage, which))

    if warpgroup.quantised and not _keys_in_registers(warpgroup):
        plgpu.commit_smem()  # a barrier: all warps have read the last piece's values
        warpgroup.widen(0, stage)
    s = _scores(warpgroup, at, refs.q_s, at.zero)
    masked, capped = functools.partial(_masked, warpgroup, at), functools.partial(_capped, warpgroup, at)
    s = lax.cond(care & MASK != 0, masked, capped, s)
    new_top = jnp.maximum(top, s.max(axis=0))
    if warpgroup.plain and warpgroup.by_token:
        plgpu.commit_smem()  # the interpreter of jax 0.12 does not know that warps meet for a maximum, and sees a race
    refill(0)  # all warps have met for the maximum, so all have read keys and scales
    # exp2(-inf - 0) is 0 for columns that have seen nothing yet.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp2(top - base)
    p = jnp.exp2(s - _columns(base, s.shape))
    totals = totals * _columns(fade, totals.shape) + p
    values = _weighted_values(warpgroup, at, p, refill)
    return acc * _columns(fade, acc.shape) + values, new_top, totals, n + 1, warpgroup.after(ahead)


def _rows(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def _columns(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


def _keys_in_registers(warpgroup: Warpgroup) -> bool:
    """True if keys are widened in registers, where wgmma takes its first operand too. jax's interpreter does not."""
    return warpgroup.by_token and not warpgroup.plain


def _scores(warpgroup: Warpgroup, at: Place, queries, zero):
    """Products [64, rows] of a piece's keys with queries in shared memory."""
    refs, config = warpgroup.refs, warpgroup.config

    def product(acc_ref):
        if _keys_in_registers(warpgroup):
            keys = narrow.operand(refs.k_s[at.stage, 0], config.dtype)
        else:
            keys = refs.wide_s.at[zero] if warpgroup.quantised else refs.k_s.at[at.stage, 0]
        plgpu.wgmma(acc_ref, keys, queries.at[zero].transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE_KV, config.rows), jnp.float32))


def _capped(warpgroup: Warpgroup, at: Place, s):
    """Scores with scales of the keys and soft cap, in base 2."""
    config = warpgroup.config
    factor = LOG2E if config.soft_cap is None else 1 / config.soft_cap
    if warpgroup.by_token:
        scales = narrow.scales(warpgroup.refs.scales_s.at[0, at.stage], config.unit)
        factor = _rows(scales * factor, s.shape)
    s = s * factor
    return s if config.soft_cap is None else jnp.tanh(s) * (config.soft_cap * LOG2E)


def _masked(warpgroup: Warpgroup, at: Place, s):
    """`_capped` scores with repositioned sinks scored again, -inf where a query does not see a key."""
    if warpgroup.config.num_sink_queries:
        with_sinks = functools.partial(_with_sinks, warpgroup, at)
        s = lax.cond(at.care & REPOSITIONED != 0, with_sinks, lambda s: s, s)
    visible = mask.visible(warpgroup.pattern(), *warpgroup.positions(at), mask.SWAPPED)
    return jnp.where(visible, _capped(warpgroup, at, s), -jnp.inf)


def _with_sinks(warpgroup: Warpgroup, at: Place, s):
    """Scores of repositioned sinks by the queries for them, others as they are."""
    refs, config = warpgroup.refs, warpgroup.config
    # StreamingLLM has one such query for all sinks.
    count = jnp.where(warpgroup.pattern().sink_position == 1, 1, config.num_sink_queries)

    def with_sink(j, s):
        plgpu.commit_smem()  # a barrier: all warps have read the queries before
        plgpu.copy_gmem_to_smem(refs.q_sink_g.at[warpgroup.pair(at.segment), j], refs.q_sink_s.at[0], refs.sink_bar)
        plgpu.barrier_wait(refs.sink_bar)
        # care is read again, lest numbers be kept through this loop.
        other = _scores(warpgroup, at, refs.q_sink_s, refs.care_g[at.tile, at.piece()] >> 3)
        q_pos, kv_pos = warpgroup.positions(at)
        # Only the rows of this query's sinks; FAR is no sink.
        kv_pos = jnp.where((kv_pos == j) | (j == count - 1) & (kv_pos > j), kv_pos, FAR)
        return jnp.where(mask.repositioned(warpgroup.pattern(), q_pos, kv_pos, mask.SWAPPED), other, s)

    return lax.fori_loop(0, count, with_sink, s)


def _weighted_values(warpgroup: Warpgroup, at: Place, p, refill):
    """A piece's values, weighted by p [64, rows] and summed: [H, rows]. refill: asks for the values after them."""
    refs, config, stage = warpgroup.refs, warpgroup.config, at.stage
    dirty = at.care & DIRTY != 0

    def written(shape):
        return _rows(warpgroup.key_positions(at), shape) <= refs.newest_g[at.tile]

    unit_weight = None
    plgpu.barrier_wait(refs.v_bar.at[stage])
    if warpgroup.by_token:

        def scales():
            scales = narrow.scales(refs.scales_s.at[1, stage], config.unit)
            return lax.cond(dirty, lambda x: jnp.where(written(x.shape), x, 0.0), lambda x: x, scales)

        p, unit_weight = narrow.weighted_rows(p, scales, config.dtype, warpgroup.plain)
    if warpgroup.quantised:
        warpgroup.widen(1, stage, commit=False)
    p = p.astype(config.dtype)
    if warpgroup.plain:
        refs.p_s[0] = p.T
    else:
        transposed.to_shared(refs.p_s.at[0], p)
    plgpu.commit_smem()
    values_s = refs.wide_s.at[at.zero] if warpgroup.quantised else refs.v_s.at[stage, 0]

    if config.codes != jnp.int8:

        @pl.when(dirty)
        def _():
            # A weight of 0 does not silence a NaN in an unwritten slot.
            v = values_s[...]
            values_s[...] = jnp.where(written(v.shape), v, jnp.zeros_like(v))
            plgpu.commit_smem()

    def product(acc_ref):
        plgpu.wgmma(acc_ref, values_s.transpose((1, 0)), refs.p_s.at[at.zero].transpose((1, 0)))
        return acc_ref[...]

    sums = plgpu.WGMMAAccumulatorRef((config.head_dim, config.rows), jnp.float32)
    if warpgroup.quantised:
        refill(1)
    values = pl.run_scoped(product, sums)
    if not warpgroup.quantised:
        plgpu.commit_smem()  # a barrier: all warps have read them
        refill(1)
    return values if unit_weight is None else values * unit_weight


def _store(warpgroup: Warpgroup, acc, scale, lse, to: Stored) -> None:
    """Stores a segment's result, scaled, and its log-sum-exp."""
    store(to.lse_g, (to.index, pl.ds(0, warpgroup.config.rows)), lse)
    _store_columns(warpgroup, acc, scale, to.out_g, to.index)


def _store_columns(warpgroup: Warpgroup, acc, scale, to_g, index) -> None:
    """Stores scaled columns of acc [H, rows] as the first rows of to_g[index], [R, H]."""
    x = (acc * _columns(scale, acc.shape)).astype(to_g.dtype)
    if warpgroup.plain:
        to_g[index] = x.T[: to_g.shape[1]]
    else:
        transposed.to_global(to_g.at[index], x)
