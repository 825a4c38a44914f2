"""Ragged paged attention for Hopper, in Mosaic GPU: many queries to a row. Bound by the tensor cores.

A block of threads attends one query tile of 128 rows (queries x query heads of the group) of one kv head, the tiles
with most keys first. Its three warpgroups:

    producer      per piece of 128 keys one TMA box per unit: K [128, H], V [128, H] into one of `stages` buffers each
    consumers     two, of 64 rows each; per piece
                    wgmma 64 x 128 x H    scores
                    registers             soft cap, online softmax in base 2
                    wgmma 64 x H x 128    weights as bf16 or f16 from registers, times V; summed in place

With a head dim of 256 a piece is 64 keys. The consumers take turns: while one has the tensor cores, the other computes
its softmax. Pieces that need a mask come first, part by part, in a loop of their own, so the loop over the others has
none; see `prefill_work`. Pieces with sinks that sink queries score are visited by each of them: it is fetched
over the first query and attends to its own sinks only; the softmax joins what they find. The whole pool comes in with
the index of the layer: a slice of it would be a copy.

Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2 (warp specialisation, ping-pong).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import LOG2E, ROWS, int32, key_positions, load
from pallas_kernels.hopper.prefill_mask import masked_scores, scored_by
from pallas_kernels.hopper.prefill_work import (
    DIRTY,
    FIRST_REPOSITIONED,
    NEWEST,
    NUM_MASKED,
    NUM_PIECES,
    TILE,
    piece_tokens,
)
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import unit_tokens

CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """What the kernel is compiled for.

    stages: pieces of keys and values held at once. registers: weights go from registers into the second wgmma, else
    through shared memory. in_place: it adds to the output, else its sums are added afterwards. jax's interpreter of GPU
    programs can follow neither of the two. num_sink_queries: sink queries, J.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    stages: int
    soft_cap: float | None
    take_turns: bool
    registers: bool
    in_place: bool
    num_sink_queries: int

    @property
    def piece(self) -> int:
        """Tokens that are read together."""
        return piece_tokens(self.head_dim)

    @property
    def num_parts(self) -> int:
        """Parts of a piece that are masked one after the other."""
        return self.piece // self.part

    @property
    def unit(self) -> int:
        """Tokens of a unit, which one copy reads."""
        return unit_tokens(self.block_size)

    @property
    def units_of_piece(self) -> int:
        return self.piece // self.unit

    @property
    def units_of_block(self) -> int:
        return self.block_size // self.unit

    @property
    def columns(self) -> int:
        """Columns of the output that are summed together: 64 where the sums need registers of their own."""
        return self.head_dim if self.in_place or self.head_dim % 64 else 64

    @property
    def part(self) -> int:
        """Keys that are masked together: masks of a whole piece would not fit the registers."""
        return 64 if self.head_dim <= 128 else 32

    @property
    def staged(self) -> int:
        """Columns of the output that wait in shared memory at once: 128 bytes, or 64 of a head dim of 96."""
        return (128 if self.head_dim % 64 == 0 else 64) // self.out_dtype.itemsize


class Refs(NamedTuple):
    """Arrays of the kernel, in its order: inputs, outputs, scratch.

    _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive. _read: those at which the
    consumers arrive when they have read what may be overwritten. turn: that at which they take turns.
    """

    q_g: Any
    q_sink_g: Any
    pool_g: Any
    units_g: Any
    starts_g: Any
    tiles_g: Any
    positions_g: Any
    sinks_g: Any
    numbers_g: Any
    out_g: Any
    lse_g: Any
    q_s: Any
    k_s: Any
    v_s: Any
    p_s: Any
    out_s: Any
    lse_s: Any
    q_bar: Any
    k_bar: Any
    v_bar: Any
    k_read: Any
    v_read: Any
    turn: Any


class Warpgroup(NamedTuple):
    """One warpgroup and its query tile: the one at `row` of the work, for one kv head."""

    refs: Refs
    config: Config
    group: Any
    row: Any
    head: Any

    # Numbers are read where they are used, and not kept: registers are scarce.
    def number(self, which: int):
        return self.refs.tiles_g[self.row, which]

    def half(self):
        """Index of this warpgroup's 64 rows among those of all tiles and kv heads."""
        return (self.number(TILE) * self.config.num_kv_heads + self.head) * CONSUMERS + self.group

    def pattern(self) -> Pattern:
        return Pattern(*(self.refs.numbers_g[i] for i in range(len(Pattern._fields))))

    def rendezvous(self) -> None:
        plgpu.barrier_arrive(self.refs.turn)
        plgpu.barrier_wait(self.refs.turn)

    def fetch_queries(self, queries) -> None:
        plgpu.copy_gmem_to_smem(queries, self.refs.q_s.at[self.group], self.refs.q_bar.at[self.group])
        plgpu.barrier_wait(self.refs.q_bar.at[self.group])

    def key_positions(self, i, part, columns: int):
        """Text positions of `columns` slots: part number `part` of piece i."""
        size = self.config.unit
        unit = i * self.config.units_of_piece + part * columns // size
        offset = lax.rem(int32(part * columns), int32(size))
        starts = [self.refs.starts_g[self.row, unit + j] for j in range(-(-columns // size))]
        return key_positions([starts[0] + offset, *starts[1:]], size, columns)


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


def attend_tile(*refs, config: Config) -> None:
    """The kernel, for one query tile of one kv head; arguments as `prefill` makes them."""
    group, index = lax.axis_index("group"), lax.axis_index("index")
    row, head = index // config.num_kv_heads, lax.rem(index, int32(config.num_kv_heads))
    warpgroup = Warpgroup(Refs(*refs), config, group, row, head)
    pl.when(group == CONSUMERS)(lambda: _produce(warpgroup))
    pl.when(group < CONSUMERS)(lambda: _consume(warpgroup))


def _produce(warpgroup: Warpgroup) -> None:
    """Copies keys and values, `stages` pieces ahead of the consumers."""
    refs, config = warpgroup.refs, warpgroup.config
    plgpu.set_max_registers(24, action="decrease")
    parts, num_kv_heads = config.units_of_block, config.num_kv_heads
    keys = (refs.numbers_g[len(Pattern._fields)] * 2 * num_kv_heads + warpgroup.head) * parts

    def fetch(i, _):
        stage = lax.rem(i, int32(config.stages))
        buffers = (refs.k_s, refs.k_bar, refs.k_read), (refs.v_s, refs.v_bar, refs.v_read)
        for which, (to, arrived, read) in enumerate(buffers):
            pl.when(i >= config.stages)(lambda read=read: plgpu.barrier_wait(read.at[stage]))
            for j in range(config.units_of_piece):
                unit = refs.units_g[warpgroup.row, i * config.units_of_piece + j] + keys + which * num_kv_heads * parts
                slots = pl.ds(j * config.unit, config.unit)
                plgpu.copy_gmem_to_smem(refs.pool_g.at[unit], to.at[stage, slots], arrived.at[stage])

    lax.fori_loop(0, warpgroup.number(NUM_PIECES), fetch, None)
    # Each completion of a barrier is waited for: also of those that nothing will be fetched after.
    for stage in range(config.stages):

        @pl.when(stage < warpgroup.number(NUM_PIECES))
        def _(stage=stage):
            plgpu.barrier_wait(refs.k_read.at[stage])
            plgpu.barrier_wait(refs.v_read.at[stage])


def _consume(warpgroup: Warpgroup) -> None:
    """Attends one half of the tile's rows to its pieces, first to those that need a mask."""
    refs, config, number = warpgroup.refs, warpgroup.config, warpgroup.number
    plgpu.set_max_registers(240, action="increase")
    warpgroup.fetch_queries(refs.q_g.at[warpgroup.half()])

    @pl.when(number(NUM_PIECES) > 0)
    def _():
        plgpu.barrier_wait(refs.v_bar.at[0])

    pl.when((number(NUM_PIECES) > 0) & (number(DIRTY) != 0))(lambda: _silence(warpgroup))
    if config.take_turns:
        pl.when(warpgroup.group == 1)(warpgroup.rendezvous)
    state = (
        (jnp.zeros((ROWS, config.columns), jnp.float32),) * (config.head_dim // config.columns),
        jnp.full((ROWS,), -jnp.inf, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
    )
    num_visits = number(NUM_MASKED)
    if config.num_sink_queries:
        num_visits += (number(NUM_MASKED) - number(FIRST_REPOSITIONED)) * config.num_sink_queries
    masked = functools.partial(_attend_masked, warpgroup)
    state = lax.fori_loop(0, num_visits * config.num_parts, masked, state)

    def unmasked(i, carry):
        return _attend_part(warpgroup, Visit(i), carry)

    state = lax.fori_loop(number(NUM_MASKED), number(NUM_PIECES), unmasked, state)
    if config.take_turns:
        pl.when(warpgroup.group == 0)(warpgroup.rendezvous)
    _store(warpgroup, *state)


def _silence(warpgroup: Warpgroup) -> None:
    """Zeroes values in slots of the first piece that nobody has written: a weight of 0 does not silence a NaN."""
    refs, config = warpgroup.refs, warpgroup.config
    for part in range(config.piece // ROWS):  # each consumer sees to 64 slots

        @pl.when(warpgroup.group == part)
        def _(part=part):
            slots = pl.ds(part * ROWS, ROWS)
            v = refs.v_s[0, slots]
            kv_pos = lax.broadcast_in_dim(warpgroup.key_positions(0, part, ROWS), v.shape, [0])
            refs.v_s[0, slots] = jnp.where(kv_pos <= warpgroup.number(NEWEST), v, jnp.zeros_like(v))

    plgpu.commit_smem()
    warpgroup.rendezvous()


def _attend_masked(warpgroup: Warpgroup, j, carry):
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


def _store(warpgroup: Warpgroup, acc, top, total) -> None:
    """Stores the result, normalised, and its log-sum-exp, both with the learned sink."""
    refs, config, group, half = warpgroup.refs, warpgroup.config, warpgroup.group, warpgroup.half
    # A learned sink is one more logit, without a value.
    nothing = total == 0.0
    sink = load(refs.sinks_g, warpgroup.head)
    new_top = jnp.where(nothing, 0.0, jnp.maximum(top, sink))
    fade = jnp.exp2(top - new_top)
    total = jnp.where(nothing, 1.0, total * fade + jnp.exp2(sink - new_top))
    refs.lse_s[group] = jnp.where(nothing, -jnp.inf, new_top * (1 / LOG2E) + jnp.log(total))
    scale = lax.broadcast_in_dim(fade / total, acc[0].shape, [0])
    width = config.columns
    for i in range(0, config.head_dim, config.staged):
        part = (acc[i // width] * scale)[:, i % width : i % width + config.staged]
        refs.out_s[group] = part.astype(config.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.out_s.at[group], refs.out_g.at[half(), :, pl.ds(i, config.staged)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_smem_to_gmem(refs.lse_s.at[group], refs.lse_g.at[half()])
    plgpu.wait_smem_to_gmem(0)
