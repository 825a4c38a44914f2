"""A warpgroup of the prefill kernel: its configuration, the arrays that it sees, and where it waits for others."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import int32, key_positions
from pallas_kernels.hopper.prefill_work import SPLIT, TILE, piece_tokens
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import unit_tokens

CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration that the kernel is compiled for.

    stages: pieces of keys and values held at once. registers: weights go from registers into the second wgmma, else
    through shared memory. in_place: it adds to the output, as compiled kernels do; else its sums are added afterwards.
    jax's interpreter of GPU programs supports neither. num_sink_queries: sink queries, J.
    splits: of each tile over its keys. codes: dtype of a quantised pool, None for 16 bits; dtype is the dtype of the
    factors.
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
    splits: int
    codes: jnp.dtype | None = None

    @property
    def by_token(self) -> bool:
        """True if scales multiply scores and weights."""
        return self.codes is not None and self.codes != jnp.int4

    @property
    def in_units(self) -> bool:
        """True if weights times scales are held in units of each piece's largest scale: float16 has a short range."""
        return self.by_token and self.dtype == jnp.float16

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the warpgroup that copies, and widens codes."""
        return 24 if self.codes is None else 72

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread: three warpgroups have 3 x 168 to share."""
        return (3 * 168 - self.producer_registers) // CONSUMERS // 8 * 8

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
        """Columns of the output that are summed together: 64 where the sums need separate registers."""
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

    _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive. _read: barriers at which the
    consumers arrive once they have read memory that may then be overwritten. turn: barrier at which they take turns.

    For a quantised pool, codes and raw (scales) are copied. The producer turns them into the consumers' input: k, v,
    scales [stages + 1, 2, piece] of both, and if weights are held in units, largest [stages + 1, 64]: in each row
    the logarithm in base 2 of the largest scale of the values.
    """

    q_g: Any
    q_sink_g: Any
    pool_g: Any
    scales_g: Any
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
    codes_s: Any
    raw_s: Any
    scales_s: Any
    largest_s: Any
    p_s: Any
    out_s: Any
    lse_s: Any
    q_bar: Any
    codes_bar: Any
    raw_bar: Any
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
        """Index of this warpgroup's 64 rows among the rows of all tiles and kv heads."""
        return (self.number(TILE) * self.config.num_kv_heads + self.head) * CONSUMERS + self.group

    def split(self):
        """Index of this warpgroup's rows among the rows of all splits."""
        return self.half() * self.config.splits + self.number(SPLIT)

    def first_unit(self):
        """Offset from a unit's index in the work to its index in the pool: the layer's keys of this head."""
        layer, config = self.refs.numbers_g[len(Pattern._fields)], self.config
        return (layer * 2 * config.num_kv_heads + self.head) * config.units_of_block

    def unit_index(self, first, i, j: int, which: int):
        """Index in the pool of unit j of piece i's keys (0) or values (1). first: from `first_unit`."""
        config = self.config
        values = which * config.num_kv_heads * config.units_of_block
        return self.refs.units_g[self.row, i * config.units_of_piece + j] + first + values

    def pattern(self) -> Pattern:
        return Pattern(*(self.refs.numbers_g[i] for i in range(len(Pattern._fields))))

    def rendezvous(self) -> None:
        plgpu.barrier_arrive(self.refs.turn)
        plgpu.barrier_wait(self.refs.turn)

    def take_turns(self) -> None:
        """Waits for the other consumer, which then has the tensor cores."""
        if self.config.take_turns:
            self.rendezvous()

    def stage(self, i):
        return lax.rem(i, int32(self.config.stages))

    def scales_slot(self, i):
        """Place of a piece's scales: one more than stages, as the values' scales are read before the values."""
        return lax.rem(i, int32(self.config.stages + 1))

    def scales(self, i, which: int, slots):
        """Scales of keys (0) or values (1) in slots of piece i, which `wait_for_keys` has waited for."""
        return self.refs.scales_s[self.scales_slot(i), which, slots]

    def largest(self, i):
        """Largest scale of piece i, for each row: see `Refs`; None where weights are not held in units of it."""
        return self.refs.largest_s[self.scales_slot(i)] if self.config.in_units else None

    def wait_for_keys(self, i) -> None:
        plgpu.barrier_wait(self.refs.k_bar.at[self.stage(i)])

    def wait_for_values(self, i) -> None:
        """Waits for the values of piece i, once for each; the first piece's have been waited for."""
        pl.when(i > 0)(lambda: plgpu.barrier_wait(self.refs.v_bar.at[self.stage(i)]))

    def leave_keys(self, i) -> None:
        plgpu.barrier_arrive(self.refs.k_read.at[self.stage(i)])

    def leave_values(self, i) -> None:
        plgpu.barrier_arrive(self.refs.v_read.at[self.stage(i)])

    def multiply_keys(self, scores, i, slots) -> None:
        """Starts the product of the queries and the keys in slots of piece i."""
        plgpu.wgmma(scores, self.refs.q_s.at[self.group], self.refs.k_s.at[self.stage(i), slots].transpose((1, 0)))

    def hold_weights(self, weights):
        """Holds weights for `multiply_values`, in registers or shared memory."""
        if self.config.registers:
            return weights
        self.refs.p_s[self.group, :, pl.ds(0, weights.shape[1])] = weights
        plgpu.commit_smem()
        return ()

    def multiply_values(self, products, sums, held, i, slots) -> None:
        """Starts the product of held weights and the values in slots of piece i; sums: added to it."""
        weights = held if self.config.registers else self.refs.p_s.at[self.group, :, pl.ds(0, slots.size)]
        for j, product in enumerate(products):
            width = self.config.columns
            if self.config.in_place:
                product[...] = sums[j]
            plgpu.wgmma(product, weights, self.refs.v_s.at[self.stage(i), slots, pl.ds(j * width, width)])

    def sums(self, products, sums):
        """The results of `multiply_values`, after waiting for them."""
        if self.config.in_place:
            return tuple(product[...] for product in products)
        return tuple(x + product[...] for x, product in zip(sums, products, strict=True))

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
