"""A warpgroup of the decode kernel: its arrays, its copies, and its waits for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import quantised as narrow
from pallas_kernels.hopper.common import LOG2E, Config, fetch_rows, finished, int32, key_positions, load
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import HEAD, NUM_PIECES, PIECE, TILE


class Refs(NamedTuple):
    """Arrays of the kernel, in its order: inputs, outputs, scratch.

    _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive. _read: where warpgroups
    arrive once they have read memory that may then be overwritten.
    """

    q_g: Any
    q_sink_g: Any
    pool_g: Any
    scales_g: Any
    units_g: Any
    starts_g: Any
    care_g: Any
    positions_g: Any
    newest_g: Any
    segments_g: Any
    first_g: Any
    of_pair_g: Any
    sinks_g: Any
    numbers_g: Any
    partial_g: Any
    partial_lse_g: Any
    out_g: Any
    lse_g: Any
    q_s: Any
    q_sink_s: Any
    k_s: Any
    v_s: Any
    scales_s: Any
    wide_s: Any
    p_s: Any
    partial_s: Any
    out_s: Any
    q_bar: Any
    sink_bar: Any
    k_bar: Any
    v_bar: Any
    wide_bar: Any
    sink_read: Any
    k_read: Any
    v_read: Any


class Place(NamedTuple):
    """A piece of a segment, and its place. piece: gives its number in the tile. care: bits of `Work.care`.

    zero: the three bits of care shifted out: 0, which no compiler knows. So it computes the places of a wgmma's
      operands just before, instead of keeping all these numbers in 50 registers.
    """

    segment: Any
    tile: Any
    piece: Any
    stage: Any
    care: Any
    zero: Any


class Ahead(NamedTuple):
    """A piece to request, with the places of its units: a refill of a buffer waits for no load.

    keys: for each unit the index of its keys in the pool's units; none where these would not fit the registers.
    """

    segment: Any
    piece: Any
    keys: tuple[Any, ...]


class Warpgroup(NamedTuple):
    """One warpgroup of a block of threads. leads: it asks for copies. layer: of the pool. until: end of the stretch."""

    refs: Refs
    config: Config
    plain: bool
    group: Any
    leads: Any
    layer: Any
    until: Any

    @property
    def together(self) -> bool:
        return self.config.warpgroups > 1

    @property
    def quantised(self) -> bool:
        return self.config.codes is not None

    @property
    def by_token(self) -> bool:
        """True if scales multiply scores and weights."""
        return self.quantised and self.config.codes != jnp.int4

    @property
    def last_segment(self) -> int:
        return self.refs.segments_g.shape[0] - 1

    def pattern(self) -> Pattern:  # read where it is used, and not kept: registers are scarce
        return Pattern(*(self.refs.numbers_g[i] for i in range(len(Pattern._fields))))

    def pair(self, segment):
        """Index of a segment's (query tile, kv head)."""
        segments = self.refs.segments_g
        return segments[segment, TILE] * self.config.num_kv_heads + segments[segment, HEAD]

    def key_positions(self, at: Place):
        count = self.config.units_of_piece
        starts = [self.refs.starts_g[at.tile, at.piece() * count + j] for j in range(count)]
        return key_positions(starts, self.config.unit)

    def positions(self, at: Place):
        """Positions of the queries and of a piece's keys."""
        return load(self.refs.positions_g, at.tile), self.key_positions(at)

    def ahead(self, segment, piece) -> Ahead:
        """A piece of a segment; of segments beyond the last one, any."""
        if self.config.scarce_registers:
            return Ahead(segment, piece, ())
        known = jnp.minimum(piece, self.refs.care_g.shape[1] - 1)
        return Ahead(segment, piece, self._keys(jnp.minimum(segment, self.last_segment), known))

    def _keys(self, segment, piece) -> tuple[Any, ...]:
        refs, config = self.refs, self.config
        tile, head = refs.segments_g[segment, TILE], refs.segments_g[segment, HEAD]
        layer = refs.numbers_g[len(Pattern._fields)] if config.scarce_registers else self.layer
        row = (layer * config.sides * config.num_kv_heads + head) * config.units_of_block
        first = piece * config.units_of_piece
        return tuple(refs.units_g[tile, first + i] + row for i in range(config.units_of_piece))

    def fetch(self, ahead: Ahead, stage, which: int) -> None:
        """Requests keys (0) or values (1) of one piece of a segment."""
        refs, config = self.refs, self.config
        size, width = config.unit, config.width
        arrives = (refs.k_bar, refs.v_bar)[which].at[stage]
        for i, keys in enumerate(ahead.keys or self._keys(ahead.segment, ahead.piece)):
            unit, slots = keys + which * config.num_kv_heads * config.units_of_block, pl.ds(i * size, size)
            if self.quantised:
                part = narrow.place(refs.scales_s.at[which, stage], i, size)
                plgpu.copy_gmem_to_smem(refs.scales_g.at[unit], part, arrives)
            for j in range(config.warpgroups):
                part = refs.pool_g.at[unit, :, pl.ds(j * width, width)]
                plgpu.copy_gmem_to_smem(part, (refs.k_s, refs.v_s)[which].at[stage, j, slots], arrives)

    def fetch_queries(self, segment) -> None:
        to = self.refs.q_s.at[0, pl.ds(0, self.config.rows)]
        fetch_rows(self.refs.q_g, self.pair(segment), to, self.refs.q_bar)

    def after(self, ahead: Ahead) -> Ahead:
        """The piece after one, perhaps the first of the next segment."""
        segments = self.refs.segments_g
        segment = jnp.minimum(ahead.segment, self.last_segment)
        done = ahead.piece + 1 == segments[segment, PIECE] + segments[segment, NUM_PIECES]
        following = jnp.minimum(segment + 1, self.last_segment)
        piece = jnp.where(done, segments[following, PIECE], ahead.piece + 1)
        return self.ahead(jnp.where(done, segment + 1, segment), piece)

    def all_have_read(self, barrier) -> None:
        """Waits, where this warpgroup leads, until all of them have arrived."""
        if self.together:
            plgpu.barrier_arrive(barrier)
            pl.when(self.leads)(lambda: plgpu.barrier_wait(barrier))

    def widen(self, which: int, stage, commit: bool = True) -> None:
        """Writes this warpgroup's columns of keys (0) or values (1) in 16 bits. commit: for wgmma to read, at once."""
        refs, config = self.refs, self.config
        x = narrow.widened((refs.k_s, refs.v_s)[which][stage, self.group], config.dtype, self.plain)
        narrow.write(refs.wide_s.at[self.group], x, refs.scales_s.at[which, stage], which, self.group * config.width)
        if commit:
            plgpu.commit_smem()

    def wide_written_or_read(self) -> None:
        """Waits until all warpgroups have arrived: their parts of the widened keys are read by all of them."""
        if self.together:
            plgpu.barrier_arrive(self.refs.wide_bar)
            plgpu.barrier_wait(self.refs.wide_bar)


class Stored(NamedTuple):
    """Places for a segment's result and log-sum-exp: [index] of both arrays. staged_s: shared memory on the way."""

    out_g: Any
    lse_g: Any
    index: Any
    staged_s: Any


def store_segment(
    warpgroup: Warpgroup, segment, top, total, sinks_g, store: Callable[[Any, Any, Stored], None]
) -> None:
    """Stores the result of a segment: the pair's, if it has no other.

    Args:
      top, total: the largest score in base 2 of each row, and the sum of its weights.
      sinks_g: [K, rows] learned sink logits in base 2; None without.
      store: takes the factor for the sum of weighted values, the log-sum-exp, and the places of both.
    """
    refs, pair = warpgroup.refs, warpgroup.pair(segment)
    whole = refs.of_pair_g[pair] + 1 == refs.of_pair_g[pair + 1]

    @pl.when(whole)
    def _():  # in the call's dtype, and the natural log-sum-exp, both with the learned sink
        sink = None if sinks_g is None else load(sinks_g, lax.rem(pair, int32(warpgroup.config.num_kv_heads)))
        store(*finished(top, total, sink), Stored(refs.out_g, refs.lse_g, pair, refs.out_s))

    @pl.when(jnp.logical_not(whole))
    def _():  # normalised, and the log2-sum-exp
        nothing = total == 0.0
        weight = jnp.where(nothing, 1.0, total)
        lse = jnp.where(nothing, -jnp.inf, top + jnp.log(weight) * LOG2E)
        store(1.0 / weight, lse, Stored(refs.partial_g, refs.partial_lse_g, segment, refs.partial_s))
