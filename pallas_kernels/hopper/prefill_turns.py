"""Turns of a consumer of the prefill kernel: scores of a piece, its softmax, its values."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import LOG2E, ROWS, int32, load
from pallas_kernels.hopper.prefill_mask import masked_scores, scored_by
from pallas_kernels.hopper.prefill_warpgroup import Config, Warpgroup
from pallas_kernels.hopper.prefill_work import FIRST_REPOSITIONED, NUM_MASKED, NUM_PIECES


class State(NamedTuple):
    """Running results of the online softmax.

    sums: weights times values, [64, columns] for each part of the columns. top: largest score of each row, in base 2.
    total: sum of its weights. largest: unless None, sums must still be multiplied with 2 to the power of it.
    """

    sums: tuple[jax.Array, ...]
    top: jax.Array
    total: jax.Array
    largest: jax.Array | None


class Visit(NamedTuple):
    """One turn of a consumer with a mask: part number `part` of piece i.

    first, last: the turn begins, or ends, the piece. query: 0 for the first query if repositioned sinks are in the
    piece, j for q_sink number j - 1; -1 without any.
    """

    i: Any
    part: Any
    first: Any
    last: Any
    query: Any = -1


def attend_masked(warpgroup: Warpgroup, j, state: State) -> State:
    """Turn j of those that need a mask. Pieces with repositioned sinks are visited once for each query."""
    refs, config, number = warpgroup.refs, warpgroup.config, warpgroup.number
    num_parts, num_sinks = config.num_parts, config.num_sink_queries
    i, part = j // num_parts, lax.rem(j, int32(num_parts))
    first, last = part == 0, part == num_parts - 1
    if not num_sinks:
        return _attend_part(warpgroup, Visit(i, part, first, last), state)
    beyond = i - number(FIRST_REPOSITIONED)
    # The first query, and after it each of q_sink; -1 with nothing for them.
    query = jnp.where(beyond < 0, -1, lax.rem(beyond, int32(1 + num_sinks)))
    i = jnp.where(beyond < 0, i, number(FIRST_REPOSITIONED) + beyond // (1 + num_sinks))
    pl.when(first & (query > 0))(lambda: warpgroup.fetch_queries(refs.q_sink_g.at[warpgroup.half(), query - 1]))
    leaves = (query < 0) | (query == num_sinks)
    state = _attend_part(warpgroup, Visit(i, part, first & (query <= 0), last & leaves, query), state)
    pl.when(last & (query == num_sinks))(lambda: warpgroup.fetch_queries(refs.q_g.at[warpgroup.half()]))
    return state


def _attend_part(warpgroup: Warpgroup, visit: Visit, state: State) -> State:
    config = warpgroup.config
    slots = pl.ds(pl.multiple_of(visit.part * config.part, config.part), config.part)
    pl.when(visit.first)(lambda: warpgroup.wait_for_keys(visit.i))
    s = _scores(warpgroup, visit.i, slots, config.part)
    pl.when(visit.last)(lambda: warpgroup.leave_keys(visit.i))
    s, scale = _capped(warpgroup, s, visit.i, slots)
    largest = warpgroup.largest(visit.i)
    new = _softmax(_masked(warpgroup, visit, s), scale, state, largest, rows_may_be_empty=True)
    weights = _times_scales(warpgroup, new.weights, visit.i, slots).astype(config.dtype)
    sums, weights, top, total = _pinned(config, (_faded(state.sums, new.fade), weights, new.top, new.total))
    held = warpgroup.hold_weights(weights)
    warpgroup.take_turns()
    pl.when(visit.first)(lambda: warpgroup.wait_for_values(visit.i))
    sums = _with_values(warpgroup, sums, held, visit.i, slots)
    pl.when(visit.last)(lambda: warpgroup.leave_values(visit.i))
    return State(sums, top, total, largest)


def attend_unmasked(warpgroup: Warpgroup, state: State) -> State:
    """All turns without a mask, each of a whole piece.

    The product of a piece's weights and values follows the scores of the next piece into the tensor cores, which
    compute it during the softmax of these.
    """
    config = warpgroup.config
    first, end = warpgroup.number(NUM_MASKED), warpgroup.number(NUM_PIECES)
    slots = pl.ds(0, config.piece)

    def attend():
        warpgroup.wait_for_keys(first)
        s, scale = _capped(warpgroup, _scores(warpgroup, first, slots, config.piece), first, slots)
        warpgroup.leave_keys(first)
        largest = warpgroup.largest(first)
        new = _softmax(s, scale, state, largest)
        weights = _times_scales(warpgroup, new.weights, first, slots)
        held = warpgroup.hold_weights(weights.astype(config.dtype))
        warpgroup.take_turns()
        carry = State(_faded(state.sums, new.fade), new.top, new.total, largest), held
        (sums, top, total, largest), held = lax.fori_loop(first + 1, end, turn, carry)
        warpgroup.wait_for_values(end - 1)
        sums = _with_values(warpgroup, sums, held, end - 1, slots)
        warpgroup.leave_values(end - 1)
        return State(sums, top, total, largest)

    def turn(i, carry):
        state, held = carry
        warpgroup.wait_for_keys(i)
        warpgroup.wait_for_values(i - 1)

        def multiply(scores):
            warpgroup.multiply_keys(scores, i, slots)
            return pl.run_scoped(functools.partial(overlap, scores), *_accumulators(state.sums))

        def overlap(scores, *products):
            warpgroup.multiply_values(products, state.sums, held, i - 1, slots)
            warpgroup.take_turns()
            s = plgpu.wgmma_accumulator_load(scores, wait_n=len(products))
            warpgroup.leave_keys(i)
            s, scale = _capped(warpgroup, s, i, slots)
            largest = warpgroup.largest(i)
            new = _softmax(s, scale, state, largest)
            new = _pinned(config, new._replace(weights=_times_scales(warpgroup, new.weights, i, slots)))
            # Loops until it is this one's turn, and ptxas moves no wait across a loop: not the next one either, which
            # would then come before the softmax.
            warpgroup.take_turns()
            sums, new = _pinned(config, (warpgroup.sums(products, state.sums), new))
            warpgroup.leave_values(i - 1)
            # Narrowed only now: ptxas serialises wgmmas during which operands of others are written.
            weights = warpgroup.hold_weights(new.weights.astype(config.dtype))
            return State(_faded(sums, new.fade), new.top, new.total, largest), weights

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, config.piece), jnp.float32))

    return lax.cond(first < end, attend, lambda: state)


class Softmax(NamedTuple):
    """A turn of the online softmax: weights [64, columns] float32, and factors [64] of earlier sums."""

    weights: jax.Array
    fade: jax.Array
    top: jax.Array
    total: jax.Array


def _softmax(s, scale: float, state: State, largest=None, rows_may_be_empty: bool = False) -> Softmax:
    """A turn of scores that are yet to be multiplied with a scale. largest: of `State`, after it."""
    top = jnp.maximum(state.top, s.max(axis=1) * scale)
    # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
    base = jnp.where(top == -jnp.inf, 0.0, top) if rows_may_be_empty else top
    fade = jnp.exp2(state.top - base)
    in_units = base if largest is None else base + largest
    weights = jnp.exp2(s * scale - lax.broadcast_in_dim(in_units, s.shape, [0]))
    total = weights.sum(axis=1)
    if largest is None:
        return Softmax(weights, fade, top, state.total * fade + total)
    total = state.total * fade + total * jnp.exp2(largest)
    return Softmax(weights, fade * jnp.exp2(state.largest - largest), top, total)


def _times_scales(warpgroup: Warpgroup, weights, i, slots):
    """Weights of piece i, each times the scale of its value."""
    if not warpgroup.config.by_token:
        return weights
    return weights * lax.broadcast_in_dim(warpgroup.scales(i, 1, slots), weights.shape, [1])


def _faded(sums, fade):
    return tuple(x * lax.broadcast_in_dim(fade, x.shape, [0]) for x in sums)


def _pinned(config: Config, x):
    """x, which is complete before anything that follows; jax's interpreter does not know the operation."""
    return lax.optimization_barrier(x) if config.in_place else x


def _scores(warpgroup: Warpgroup, i, slots, columns: int):
    def multiply(ref):
        warpgroup.multiply_keys(ref, i, slots)
        warpgroup.take_turns()
        return ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))


def _capped(warpgroup: Warpgroup, s, i, slots):
    """Scores of piece i with the keys' scales and soft cap, and the factor that they still need to be in base
    2."""
    cap = warpgroup.config.soft_cap
    factor = LOG2E if cap is None else 1 / cap
    if warpgroup.config.by_token:  # scales have the factor
        s, factor = s * lax.broadcast_in_dim(warpgroup.scales(i, 0, slots), s.shape, [1]), 1.0
    return (s, factor) if cap is None else (jnp.tanh(s * factor), cap * LOG2E)


def _masked(warpgroup: Warpgroup, visit: Visit, s):
    config = warpgroup.config

    def positions():
        q_pos = load(warpgroup.refs.positions_g, (warpgroup.row, warpgroup.group))
        return q_pos, warpgroup.key_positions(visit.i, visit.part, config.part)

    s = masked_scores(s, warpgroup.pattern, positions)
    if config.num_sink_queries:
        own_keys = functools.partial(scored_by, visit.query, config.num_sink_queries, warpgroup.pattern, positions)
        s = lax.cond(visit.query < 0, lambda s: s, own_keys, s)
    return s


def _accumulators(sums):
    return [plgpu.WGMMAAccumulatorRef(x.shape, jnp.float32) for x in sums]


def _with_values(warpgroup: Warpgroup, sums, held, i, slots):
    """sums plus held weights times values."""

    def multiply(*products):
        warpgroup.multiply_values(products, sums, held, i, slots)
        return warpgroup.sums(products, sums)

    return pl.run_scoped(multiply, *_accumulators(sums))
