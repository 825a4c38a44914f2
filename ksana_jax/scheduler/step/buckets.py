"""Buckets: the shapes that steps are padded to, from ladders of sizes, so that few shapes are compiled. No jax."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Mapping

from ksana_jax.core.config import EngineConfig
from ksana_jax.scheduler.step.ladders import (
    coarse_parts,
    ladder,
    least_rows,
    tile_parts,
    verification_parts,
    verified_sizes,
)
from ksana_jax.scheduler.step.shared_prefix import SHARED_ROWS
from ksana_jax.scheduler.step.types import StepShape, TileGroup

# Rows up to which a draft model has as many numbers of rows as its target.
FEW_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that steps are padded to.

    Args:
      decodes: numbers of rows that compute one token; also numbers of tokens whose logits are computed.
      tiles: parts for longer chunks, see `tile_parts`; the first that holds a step is used.
      widths: widths of block tables.
      shared_rows: decodes per group that may share leading blocks; 0 turns sharing off. Steps without sharing have
        their own shapes: checking for shared blocks in every layer would cost about 6 % (8 layers, 32 rows, CPU).
      verifications: parts of steps that verify drafts, see `verification_parts`.
      trees: True if drafts may branch. Runs of drafts have separate steps, which cost less.
      joins: True if steps may have both decodes and chunks.
    """

    decodes: tuple[int, ...]
    tiles: tuple[TileGroup, ...]
    widths: tuple[int, ...]
    shared_rows: int = 0
    verifications: tuple[TileGroup, ...] = ()
    trees: bool = False
    joins: bool = True

    @classmethod
    def of(
        cls, config: EngineConfig, platform: str, draft_lengths: Mapping[int, int] | None = None, trees: bool = False
    ) -> Buckets:
        """Returns the buckets for an engine's steps: ladders of factors of two; for widths, of four from 64, because
        a table costs little beyond its bytes.

        Requests of up to 384 tokens take as long with tables of 64 blocks as with a ladder from 16 (8 layers, 32 rows,
        CPU), and half as many steps are compiled. With factors of two, the host would gather 1,024 tables of 65
        blocks in 44 us instead of 77 (256 tables: 13 instead of 20), but an engine with texts of 2,048 blocks would
        compile half as many steps again. Widths go up to a full table's, so that all patterns use the same shapes.

        Args:
          config: an engine config with max_model_len set. platform: the device's platform: "cpu", "gpu", "tpu", ...
          draft_lengths: see `verification_parts`. trees: True if drafts may branch.
        """
        assert config.max_model_len is not None
        min_rows = least_rows(config, platform)
        return cls(
            decodes=ladder(min_rows, max(config.max_num_seqs, min_rows)),
            tiles=tile_parts(config.max_num_batched_tokens, config.query_tile, min_rows),
            widths=ladder(64, -(-config.max_model_len // config.block_size), 4.0),
            shared_rows=SHARED_ROWS if config.shared_prefix_attention else 0,
            verifications=verification_parts(config, draft_lengths or {}, min_rows),
            trees=trees,
        )

    def of_drafts(self, config: EngineConfig) -> Buckets:
        """Returns the buckets of a draft model, whose steps cost little: fewer of them, and none with both decodes and
        chunks. Two rows decode as fast in a step of four; beyond FEW_ROWS, numbers of rows grow by factors of four."""
        most = self.decodes[-1]
        few = {count for count in self.decodes if count <= FEW_ROWS and count != 2}
        decodes = tuple(sorted(few | {*ladder(min(4 * FEW_ROWS, most), most, 4.0)}))
        min_rows = 1 if 1 in decodes else decodes[0]
        tiles = coarse_parts(config.max_num_batched_tokens, config.query_tile, config.max_num_seqs, min_rows)
        return dataclasses.replace(
            self, decodes=decodes, tiles=tiles, shared_rows=0, verifications=(), trees=False, joins=False
        )

    def shape(self, num_decodes: int, counts: Iterable[int], width: int, shares: bool = False) -> StepShape:
        """Returns the smallest bucket that holds a step.

        Steps with decodes and chunks use the largest number of decodes: decodes are cheap compared with a tile, and
        this limits the number of combinations. So do steps without decodes if that costs little.

        Args:
          counts: tokens of each longer chunk. width: width of the widest block table.
          shares: True if groups of decodes share leading blocks.
        """
        if not (counts := list(counts)):
            parts = (TileGroup(_at_least(self.decodes, num_decodes), 1),)
        else:
            tiles = next(p for p in self.tiles if sum(-(-c // p.width) for c in counts) <= p.count)
            parts = (TileGroup(self.decodes[-1], 1), tiles) if num_decodes or self._joined(tiles) else (tiles,)
        return self._shape(parts, _at_least(self.widths, width), self.shared_rows if shares else 0)

    def most_drafts(self, num_rows: int) -> int:
        """Returns the maximum draft tokens of each row that a step of num_rows decodes can verify."""
        return max((part.width - 1 for part in self.verifications if part.count >= num_rows), default=0)

    def verification(self, num_rows: int, most_drafts: int, width: int, tree: bool = False) -> StepShape:
        """Returns the smallest bucket for decodes with up to most_drafts draft tokens; width as in `shape`.

        Args:
          tree: True if drafts branch.
        """
        part = next(p for p in self.verifications if p.count >= num_rows and p.width > most_drafts)
        return self._verification(part, _at_least(self.widths, width), tree)

    def _verification(self, part: TileGroup, width: int, tree: bool) -> StepShape:
        size = part.count * part.width
        return StepShape((part,), width, max_sampled=size if self.trees else self._verified[size], tree=tree)

    @functools.cached_property
    def _verified(self) -> dict[int, int]:
        return verified_sizes(self.verifications)

    def _shape(self, parts: tuple[TileGroup, ...], width: int, shared_rows: int = 0) -> StepShape:
        return StepShape(parts, width, max_sampled=self.decodes[-1], shared_rows=shared_rows)

    def _joined(self, tiles: TileGroup) -> bool:
        """True if tiles are compiled only together with decodes: if decodes are at most an eighth of the tokens, or if
        tiles are narrow, because these serve many rows, some of which usually decode."""
        if not self.joins:
            return False
        widest = max(part.width for part in self.tiles)
        return tiles.width < widest or 8 * self.decodes[-1] <= tiles.count * tiles.width

    def num_sampled(self, count: int) -> int:
        """Returns the smallest bucket for `count` tokens whose logits are computed."""
        return _at_least(self.decodes, count) if count else 0

    @property
    def largest_tiles(self) -> list[TileGroup]:
        """The largest part for chunks of each width of tiles, the widest first."""
        largest = {tiles.width: tiles for tiles in self.tiles}
        return sorted(largest.values(), key=lambda tiles: -tiles.width)

    def largest(self) -> list[StepShape]:
        """Returns the largest shape for each width of tiles; one of them takes the most memory."""
        most = {tiles.width: tiles for tiles in self.tiles}
        parts = [(TileGroup(self.decodes[-1], 1), tiles) for tiles in most.values()]
        return [self._shape(p, self.widths[-1], self.shared_rows) for p in parts]

    def all_shapes(self, max_width: int | None = None) -> list[StepShape]:
        """Returns every shape that a step can have, up to a width of the block tables."""
        return list(dict.fromkeys(self.plain_shapes(max_width) + self.verification_shapes(max_width)))

    def verification_shapes(self, max_width: int | None = None) -> list[StepShape]:
        """Returns the shapes of steps with drafts, as `all_shapes` does."""
        kinds = (False, True) if self.trees else (False,)
        return [
            self._verification(part, width, tree)
            for width in self._widths(max_width)
            for part in self.verifications
            for tree in kinds
        ]

    def _widths(self, max_width: int | None) -> list[int]:
        top = _at_least(self.widths, min(max_width or self.widths[-1], self.widths[-1]))
        return [w for w in self.widths if w <= top]

    def plain_shapes(self, max_width: int | None = None) -> list[StepShape]:
        """Returns the shapes of steps without drafts, as `all_shapes` does."""
        most = TileGroup(self.decodes[-1], 1)
        found = [(TileGroup(d, 1),) for d in self.decodes]
        found += [(most, tiles) for tiles in self.tiles if self.joins]
        found += [(tiles,) for tiles in self.tiles if not self._joined(tiles)]
        shapes = [self._shape(parts, width) for width in self._widths(max_width) for parts in found]
        if self.shared_rows:
            several = [s for s in shapes if s.parts[0].width == 1 and s.parts[0].count > 1]
            shapes += [shape._replace(shared_rows=self.shared_rows) for shape in several]
        return shapes


def _at_least(sizes: tuple[int, ...], count: int) -> int:
    return sizes[bisect.bisect_left(sizes, count)]
