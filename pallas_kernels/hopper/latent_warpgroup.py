"""A warpgroup of the kernel for latents: its arrays, its copies, and how it widens codes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import quantised as narrow
from pallas_kernels.hopper.common import ROWS, Config, fetch_rows, int32
from pallas_kernels.hopper.decode_warpgroup import Ahead, Place, Warpgroup

STAGES = 2
SCORER, OTHER = range(2)
# Columns of the largest wgmma.
WIDEST = 256
# Codes of a latent that share a scale.
GROUP = 128
# Numbers of each row that go to the second warpgroup, see `Latents.row_numbers`.
FADE, TOTAL = range(2)


@dataclasses.dataclass(frozen=True)
class LatentConfig(Config):
    """The configuration that the kernel is compiled for. parts: blocks of threads, of 64 rows, for each stretch."""

    sides: int = 1
    parts: int = 1

    @property
    def rotated(self) -> int:
        """Channels that a latent of codes has next to them: its first ones."""
        return ROWS if self.codes else 0

    @property
    def left(self) -> int:
        """Channels of the second warpgroup: the first ones of a latent."""
        return self.head_dim - self.right

    @property
    def right(self) -> int:
        """Channels of the first warpgroup, which also scores: the fewer, in whole tiles of shared memory."""
        return self.head_dim // 2 // ROWS * ROWS


class Refs(NamedTuple):
    """Arrays of the kernel, in its order: inputs, outputs, scratch.

    _g: in global memory. _s: in shared memory. left_s, right_s: [stages, 64, channels] as stored. p_s: weights. rows_s:
    numbers of each row for the second warpgroup, not with codes. Only with codes: scales_s [stages, 64, groups],
    rotated_s [stages, 64, channels], and wide_left_s, wide_right_s [1, 64, channels] for what codes stand for. _bar:
    barriers at which copies arrive. handed, taken: where the first warpgroup arrives once p_s and numbers of rows are
    written, and the second one once they may be overwritten. widened: where the second one arrives once wide_left_s is
    written.
    """

    q_g: Any
    pool_g: Any
    scales_g: Any
    rotated_g: Any
    units_g: Any
    starts_g: Any
    care_g: Any
    positions_g: Any
    newest_g: Any
    segments_g: Any
    first_g: Any
    of_pair_g: Any
    numbers_g: Any
    partial_g: Any
    partial_lse_g: Any
    out_g: Any
    lse_g: Any
    q_s: Any
    left_s: Any
    right_s: Any
    scales_s: Any
    rotated_s: Any
    wide_left_s: Any
    wide_right_s: Any
    p_s: Any
    rows_s: Any
    q_bar: Any
    left_bar: Any
    right_bar: Any
    handed: Any
    taken: Any
    widened: Any
    partial_s: None = None  # results go from registers to global memory
    out_s: None = None


class Latents(Warpgroup):
    """A warpgroup of the kernel; group is known when it is traced."""

    refs: Refs
    config: LatentConfig

    @property
    def part(self):
        """Part of the query heads that this block of threads attends."""
        return lax.rem(lax.axis_index("index"), int32(self.config.parts))

    @property
    def columns(self) -> tuple[int, ...]:
        """Widths of the matrices of this warpgroup's columns of the output."""
        config = self.config
        widths = (config.right,) if self.group == SCORER else (config.rotated, config.left - config.rotated)
        return tuple(min(WIDEST, width - i) for width in widths for i in range(0, width, WIDEST))

    @property
    def stored_s(self):
        return self.refs.right_s if self.group == SCORER else self.refs.left_s

    def row_numbers(self, stage, which: int):
        """Place of FADE or TOTAL of each row. With codes, 1 KB more would not fit: it is where scales of the piece
        were."""
        return self.refs.scales_s.at[stage, :, which] if self.quantised else self.refs.rows_s.at[which]

    def operands(self, at: Place, group: int) -> tuple[Any, ...]:
        """Channels [64, width] of a piece in the products, those of one warpgroup."""
        refs, scores = self.refs, group == SCORER
        if not self.quantised:
            return ((refs.right_s if scores else refs.left_s).at[at.stage],)
        return (
            (refs.wide_right_s.at[at.zero],) if scores else (refs.rotated_s.at[at.stage], refs.wide_left_s.at[at.zero])
        )

    def fetch_part(self, ahead: Ahead, stage) -> None:
        """Requests this warpgroup's channels of a piece; the second one requests scales for both."""
        config, refs, scores = self.config, self.refs, self.group == SCORER
        arrives = (refs.right_bar if scores else refs.left_bar).at[stage]
        copies = [(refs.pool_g, config.left - config.rotated if scores else 0, self.stored_s)]
        if self.quantised and not scores:
            copies += [(refs.rotated_g, 0, refs.rotated_s), (refs.scales_g, 0, refs.scales_s)]
        for i, unit in enumerate(ahead.keys):
            slots = pl.ds(i * config.unit, config.unit)
            for from_g, start, to_s in copies:
                channels = from_g.at[unit, :, pl.ds(start, to_s.shape[2])]
                plgpu.copy_gmem_to_smem(channels, to_s.at[stage, slots], arrives)

    def wait_and_widen(self, stage) -> None:
        """Writes what this warpgroup's codes of a piece stand for, once they have come. All of its warps have
        multiplied the piece before, and the first one has scored it."""
        config, refs, scores = self.config, self.refs, self.group == SCORER
        plgpu.barrier_wait(refs.left_bar.at[stage])  # the scales too
        if scores:
            plgpu.barrier_wait(refs.right_bar.at[stage])
        to_s, start = (refs.wide_right_s, config.left - config.rotated) if scores else (refs.wide_left_s, 0)
        for i in range(0, to_s.shape[2], GROUP):
            columns = pl.ds(i, GROUP)
            codes = narrow.widened(self.stored_s[stage, :, columns], config.dtype, self.plain).astype(jnp.float32)
            scales = refs.scales_s[stage, :, (start + i) // GROUP]
            to_s[0, :, columns] = (codes * lax.broadcast_in_dim(scales, codes.shape, [0])).astype(config.dtype)
        plgpu.commit_smem()
        if not scores:
            plgpu.barrier_arrive(refs.widened)

    def fetch_queries(self, segment) -> None:
        index = self.pair(segment) * self.config.parts + self.part
        fetch_rows(self.refs.q_g, index, self.refs.q_s.at[0, pl.ds(0, self.config.rows)], self.refs.q_bar)
