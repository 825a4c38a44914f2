"""Buckets: the shapes that steps are padded to, so that few shapes are compiled. No jax."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from ksana_jax.scheduler.step.lone_chunks import LoneChunks
from ksana_jax.scheduler.step.types import StepShape, TileGroup


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that steps are padded to; `ladders.make_buckets` makes them.

    Args:
      decodes: numbers of rows that compute one token; also numbers of tokens whose logits are computed.
      tiles: parts for longer chunks, see `ladders.tile_parts`; the first that holds a step is used.
      widths: widths of block tables.
      shared_rows: decodes per group that may share leading blocks; 0 turns sharing off. Steps without sharing have
        their own shapes: checking for shared blocks in every layer would cost about 6 % (8 layers, 32 rows, CPU).
      verifications: parts of steps that verify drafts, see `ladders.verification_parts`.
      trees: True if drafts may branch. Runs of drafts have separate steps, which cost less.
      joins: True if steps may have both decodes and chunks.
      alone: chunks whose steps have `StepShape.alone`; None: no chunks.
    """

    decodes: tuple[int, ...]
    tiles: tuple[TileGroup, ...]
    widths: tuple[int, ...]
    shared_rows: int = 0
    verifications: tuple[TileGroup, ...] = ()
    trees: bool = False
    joins: bool = True
    alone: LoneChunks | None = None

    def shape(self, num_decodes: int, counts: Iterable[int], width: int, shares: bool = False) -> StepShape:
        """Returns the smallest bucket that holds a step.

        Steps with decodes and chunks use the largest number of decodes: decodes are cheap compared with a tile, and
        this limits the number of combinations. So do steps without decodes if that costs little.

        Args:
          counts: tokens of each longer chunk. width: width of the widest block table.
          shares: True if groups of decodes share leading blocks.
        """
        if not (counts := list(counts)):
            parts = (TileGroup(at_least(self.decodes, num_decodes), 1),)
        else:
            tiles = next(p for p in self.tiles if sum(-(-c // p.width) for c in counts) <= p.count)
            if self.alone and not num_decodes and self.alone.hold(counts, width := at_least(self.widths, width)):
                return self.plain((tiles,), width)._replace(alone=True)
            parts = (TileGroup(self.decodes[-1], 1), tiles) if num_decodes or self.are_joined(tiles) else (tiles,)
        return self.plain(parts, at_least(self.widths, width), self.shared_rows if shares else 0)

    def plain(self, parts: tuple[TileGroup, ...], width: int, shared_rows: int = 0) -> StepShape:
        """Returns the shape of a step without drafts."""
        return StepShape(parts, width, max_sampled=self.decodes[-1], shared_rows=shared_rows)

    def are_joined(self, tiles: TileGroup) -> bool:
        """True if tiles are compiled only together with decodes: if decodes are at most an eighth of the tokens, or if
        tiles are narrow, because these serve many rows, some of which usually decode."""
        if not self.joins:
            return False
        widest = max(part.width for part in self.tiles)
        return tiles.width < widest or 8 * self.decodes[-1] <= tiles.count * tiles.width

    def num_sampled(self, count: int) -> int:
        """Returns the smallest bucket for `count` tokens whose logits are computed."""
        return at_least(self.decodes, count) if count else 0


def at_least(sizes: tuple[int, ...], count: int) -> int:
    """Returns the smallest of some increasing sizes that is at least `count`."""
    return sizes[bisect.bisect_left(sizes, count)]
