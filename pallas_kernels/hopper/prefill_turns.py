"""Turns of a consumer of the prefill kernel: scores of a piece, its softmax, its values."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import LOG2E, ROWS, int32, load
from pallas_kernels.hopper.prefill_mask import masked_scores, scored_by
from pallas_kernels.hopper.prefill_warpgroup import Warpgroup
from pallas_kernels.hopper.prefill_work import FIRST_REPOSITIONED


class Visit(NamedTuple):
    """What a consumer does in one turn: part number `part` of piece i, or in the loop without masks all of it.

    first, last: the turn begins, or ends, the piece. query: 0 for the first query where repositioned sinks are in the
    piece, j for that of q_sink number j - 1; -1 where there are none.
    """

    i: Any
    part: Any = 0
    masked: bool = False
    first: Any = True
    last: Any = True
    query: Any = -1


def attend_masked(warpgroup: Warpgroup, j, carry):
    """Turn j of those that need a mask. Pieces with repositioned sinks are visited once for each query."""
    refs, config, number = warpgroup.refs, warpgroup.config, warpgroup.number
    num_parts, num_sinks = config.num_parts, config.num_sink_queries
    i, part = j // num_parts, lax.rem(j, int32(num_parts))
    first, last = part == 0, part == num_parts - 1
    if not num_sinks:
        return _attend_part(warpgroup, Visit(i, part, True, first, last), carry)
    beyond = i - number(FIRST_REPOSITIONED)
    # The first query, and after it each of q_sink; -1 where there is nothing for them.
    query = jnp.where(beyond < 0, -1, lax.rem(beyond, int32(1 + num_sinks)))
    i = jnp.where(beyond < 0, i, number(FIRST_REPOSITIONED) + beyond // (1 + num_sinks))
    pl.when(first & (query > 0))(lambda: warpgroup.fetch_queries(refs.q_sink_g.at[warpgroup.half(), query - 1]))
    leaves = (query < 0) | (query == num_sinks)
    carry = _attend_part(warpgroup, Visit(i, part, True, first & (query <= 0), last & leaves, query), carry)
    pl.when(last & (query == num_sinks))(lambda: warpgroup.fetch_queries(refs.q_g.at[warpgroup.half()]))
    return carry


def attend_unmasked(warpgroup: Warpgroup, i, carry):
    """Turn of piece i, which needs no mask."""
    return _attend_part(warpgroup, Visit(i), carry)


def _attend_part(warpgroup: Warpgroup, visit: Visit, carry):
    """One turn of the online softmax."""
    refs, config = warpgroup.refs, warpgroup.config
    acc, top, total = carry
    stage = lax.rem(visit.i, int32(config.stages))
    columns = config.part if visit.masked else config.piece
    own = pl.ds(0, columns)
    slots = pl.ds(pl.multiple_of(visit.part * columns, columns), columns) if visit.masked else own
    pl.when(visit.first)(lambda: plgpu.barrier_wait(refs.k_bar.at[stage]))
    s, scale = _scores(warpgroup, visit, stage, slots, columns)

    new_top = jnp.maximum(top, s.max(axis=1) * scale)
    # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if visit.masked else new_top
    fade = jnp.exp2(top - base)
    weights = jnp.exp2(s * scale - lax.broadcast_in_dim(base, s.shape, [0]))
    total = total * fade + weights.sum(axis=1)
    weights = weights.astype(config.dtype)
    acc = tuple(a * lax.broadcast_in_dim(fade, a.shape, [0]) for a in acc)
    if config.registers:
        acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
    else:
        refs.p_s[warpgroup.group, :, own] = weights
        plgpu.commit_smem()
        weights = refs.p_s.at[warpgroup.group, :, own]
    if config.take_turns:
        plgpu.barrier_arrive(refs.turn)
    pl.when(visit.first & (visit.i > 0))(lambda: plgpu.barrier_wait(refs.v_bar.at[stage]))
    if config.take_turns:
        plgpu.barrier_wait(refs.turn)
    acc = _add_values(warpgroup, acc, weights, stage, slots)
    pl.when(visit.last)(lambda: plgpu.barrier_arrive(refs.v_read.at[stage]))
    return acc, new_top, total


def _scores(warpgroup: Warpgroup, visit: Visit, stage, slots, columns: int):
    """Scores [64, columns] with soft cap and mask, and what they are yet to be multiplied with, which is base 2."""
    refs, config = warpgroup.refs, warpgroup.config

    def product(ref):
        plgpu.wgmma(ref, refs.q_s.at[warpgroup.group], refs.k_s.at[stage, slots].transpose((1, 0)))
        if config.take_turns:
            warpgroup.rendezvous()
        return ref[...]

    s = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))
    pl.when(visit.last)(lambda: plgpu.barrier_arrive(refs.k_read.at[stage]))
    scale = LOG2E
    if config.soft_cap is not None:
        s = jnp.tanh(s * (1 / config.soft_cap))
        scale = config.soft_cap * LOG2E
    if not visit.masked:
        return s, scale

    def positions():
        q_pos = load(refs.positions_g, (warpgroup.row, warpgroup.group))
        return q_pos, warpgroup.key_positions(visit.i, visit.part, columns)

    s = masked_scores(s, warpgroup.pattern, positions)
    if config.num_sink_queries:
        own_keys = functools.partial(scored_by, visit.query, config.num_sink_queries, warpgroup.pattern, positions)
        s = lax.cond(visit.query < 0, lambda s: s, own_keys, s)
    return s, scale


def _add_values(warpgroup: Warpgroup, acc, weights, stage, slots):
    """acc plus weights, in registers or shared memory, times values."""
    refs, config = warpgroup.refs, warpgroup.config
    width = config.columns

    def add(ref, which=0):
        plgpu.wgmma(ref, weights, refs.v_s.at[stage, slots, pl.ds(which * width, width)])

    def added(ref, which):
        add(ref, which)
        return acc[which] + ref[...]

    if config.in_place:
        return (pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc[0])),)
    ref = plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32)
    return tuple(pl.run_scoped(functools.partial(added, which=j), ref) for j in range(len(acc)))
