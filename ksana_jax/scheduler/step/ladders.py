"""Makes the buckets of an engine, ladders of sizes, and lists the shapes that its steps can have. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.devices.tuning import tuning
from ksana_jax.scheduler.step.buckets import Buckets, at_least
from ksana_jax.scheduler.step.lone_chunks import lone_chunks
from ksana_jax.scheduler.step.shared_prefix import SHARED_ROWS
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from ksana_jax.scheduler.step.verification import shape_of_part

# Rows up to which a draft model has as many numbers of rows as its target.
FEW_ROWS = 16


def ladder(smallest: int, largest: int, ratio: float = 2.0) -> tuple[int, ...]:
    """Returns increasing sizes from smallest to largest, each at most `ratio` times the previous one."""
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(max(int(sizes[-1] * ratio), sizes[-1] + 1), largest))
    return tuple(sizes)


def least_rows(config: EngineConfig, platform: str) -> int:
    """Returns the minimum rows of an engine's matrix products."""
    found = tuning(platform)
    if config.dtype != "bf16" or (found.native and config.operators.linear != "xla"):
        return 1
    return found.least_rows


def most_tiles(max_num_batched_tokens: int, query_tile: int) -> tuple[TileGroup, ...]:
    """Returns the maximum number of tiles for longer chunks, for each width of tiles, widest first.

    Short chunks would leave most of a tile of query_tile tokens empty, so tiles of a quarter of it exist, too.
    """
    widths = (query_tile, query_tile // 4) if query_tile >= 8 else (query_tile,)
    return tuple(TileGroup(-(-max_num_batched_tokens // width), width) for width in widths)


def tile_parts(max_num_batched_tokens: int, query_tile: int, min_rows: int = 1) -> tuple[TileGroup, ...]:
    """Returns parts for longer chunks: wide tiles in a ladder of factors of two, from 4 with one and a half times each
    size, all of the narrow ones or a quarter.

    Parts with fewer tokens come first; among equals, the widest tiles, which read keys for more queries at once.
    """
    found = []
    for count, width in most_tiles(max_num_batched_tokens, query_tile):
        fewest = -(-min_rows // width)
        most = max(count, fewest)
        counts = ladder(fewest, most) if width == query_tile else ladder(max(most // 4, fewest), most, 4.0)
        if width == query_tile:
            counts += tuple(count * 3 // 2 for count in counts if 4 <= count and count * 3 // 2 < most)
        found += [TileGroup(count, width) for count in counts]
    return tuple(sorted(found, key=lambda part: (part.count * part.width, -part.width)))


def coarse_parts(
    max_num_batched_tokens: int, query_tile: int, num_rows: int, min_rows: int = 1
) -> tuple[TileGroup, ...]:
    """Returns parts for longer chunks, as `tile_parts` does, in a ladder of factors of four: narrow tiles for up to
    num_rows rows, or 16, and wide ones beyond."""
    wide, narrow = (most := most_tiles(max_num_batched_tokens, query_tile))[0], most[-1]
    fewest = max(4, -(-min_rows // narrow.width))
    largest = narrow.count if wide == narrow else min(narrow.count, max(num_rows, 16))
    found = [TileGroup(count, narrow.width) for count in ladder(fewest, max(largest, fewest), 4.0)]
    count = wide.count
    while count * wide.width > found[-1].count * found[-1].width and wide != narrow:
        found.insert(0, TileGroup(count, wide.width))
        count //= 4
    return tuple(sorted(found, key=lambda part: (part.count * part.width, -part.width)))


def verification_parts(config: EngineConfig, lengths: Mapping[int, int], min_rows: int = 1) -> tuple[TileGroup, ...]:
    """Returns parts of steps that verify drafts, a tile for each row; those with fewer tokens come first.

    A step has at most max_num_batched_tokens tokens, padding included, so that it takes no more memory than steps of
    chunks.

    Args:
      lengths: numbers of draft tokens that tiles are made for, with the maximum rows of each.
    """
    found = [
        TileGroup(count, width)
        for width, most_rows in {length + 1: most for length, most in lengths.items()}.items()
        for count in ladder(-(-min_rows // width), max(config.max_num_seqs, -(-min_rows // width)))
        if count * width <= config.max_num_batched_tokens and count <= most_rows
    ]
    return tuple(sorted(found, key=lambda part: (part.count * part.width, part.count)))


def make_buckets(
    config: EngineConfig,
    platform: str,
    draft_lengths: Mapping[int, int] | None = None,
    trees: bool = False,
    model: ModelConfig | None = None,
) -> Buckets:
    """Returns the buckets for an engine's steps: ladders of factors of two; for widths, of four from 64, because a
    table costs little beyond its bytes.

    Requests of up to 384 tokens take as long with tables of 64 blocks as with a ladder from 16 (8 layers, 32 rows,
    CPU), and half as many steps are compiled. With factors of two, the host would gather 1,024 tables of 65 blocks in
    44 us instead of 77 (256 tables: 13 instead of 20), but an engine with sequences of 2,048 blocks would compile half
    as many steps again. Widths go up to a full table's, so that all patterns use the same shapes.

    Args:
      config: an engine config with max_model_len set. platform: the device's platform: "cpu", "gpu", "tpu", ...
      draft_lengths: see `verification_parts`. trees: True if drafts may branch.
      model: whose latents steps may expand, see `lone_chunks`; None: none do.
    """
    assert config.max_model_len is not None
    min_rows = least_rows(config, platform)
    return Buckets(
        decodes=ladder(min_rows, max(config.max_num_seqs, min_rows)),
        tiles=tile_parts(config.max_num_batched_tokens, config.query_tile, min_rows),
        widths=ladder(64, -(-config.max_model_len // config.block_size), 4.0),
        shared_rows=SHARED_ROWS if config.shared_prefix_attention else 0,
        verifications=verification_parts(config, draft_lengths or {}, min_rows),
        trees=trees,
        alone=lone_chunks(model, config) if model is not None and tuning(platform).native else None,
    )


def draft_buckets(target: Buckets, config: EngineConfig) -> Buckets:
    """Returns the buckets of a draft model, whose steps cost little: fewer of them, and none with both decodes and
    chunks. Two rows decode as fast in a step of four; beyond FEW_ROWS, numbers of rows grow by factors of four."""
    most = target.decodes[-1]
    few = {count for count in target.decodes if count <= FEW_ROWS and count != 2}
    decodes = tuple(sorted(few | {*ladder(min(4 * FEW_ROWS, most), most, 4.0)}))
    min_rows = 1 if 1 in decodes else decodes[0]
    tiles = coarse_parts(config.max_num_batched_tokens, config.query_tile, config.max_num_seqs, min_rows)
    return Buckets(decodes, tiles, target.widths, joins=False)


def stages(buckets: Buckets) -> tuple[Buckets, Buckets, Buckets]:
    """Returns few buckets that hold every step, more, and all, in the order of compiling them.

    Wide tables slow decodes by a tenth; a short prompt in the largest tiles takes as long as compiling smaller ones.
    """
    one_width = dataclasses.replace(buckets, widths=buckets.widths[-1:])
    decodes = tuple(sorted({buckets.decodes[0], buckets.decodes[-1]}))
    few = dataclasses.replace(one_width, decodes=decodes, tiles=tuple(largest_tiles(buckets)[::-1]))
    return few, one_width, buckets


def largest_tiles(buckets: Buckets) -> list[TileGroup]:
    """Returns the largest part for chunks of each width of tiles, the widest first."""
    largest = {tiles.width: tiles for tiles in buckets.tiles}
    return sorted(largest.values(), key=lambda tiles: -tiles.width)


def largest_shapes(buckets: Buckets) -> list[StepShape]:
    """Returns the largest shape for each width of tiles; one of them takes the most memory."""
    decodes, width = TileGroup(buckets.decodes[-1], 1), buckets.widths[-1]
    largest = {tiles.width: tiles for tiles in buckets.tiles}
    alone = [shape for shape in plain_shapes(buckets) if shape.alone]
    shapes = [buckets.plain((decodes, tiles), width, buckets.shared_rows) for tiles in largest.values()]
    return shapes + sorted(alone, key=lambda shape: (shape.table_width, shape.num_tokens))[-1:]


def all_shapes(buckets: Buckets, max_width: int | None = None) -> list[StepShape]:
    """Returns every shape that a step can have, up to a width of the block tables."""
    return list(dict.fromkeys(plain_shapes(buckets, max_width) + verification_shapes(buckets, max_width)))


def plain_shapes(buckets: Buckets, max_width: int | None = None) -> list[StepShape]:
    """Returns the shapes of steps without drafts, as `all_shapes` does."""
    most = TileGroup(buckets.decodes[-1], 1)
    found = [(TileGroup(d, 1),) for d in buckets.decodes]
    found += [(most, tiles) for tiles in buckets.tiles if buckets.joins]
    found += [(tiles,) for tiles in buckets.tiles if not buckets.are_joined(tiles)]
    shapes = [buckets.plain(parts, width) for width in _widths(buckets, max_width) for parts in found]
    shapes += [
        buckets.plain((tiles,), width)._replace(alone=True)
        for width in _widths(buckets, max_width)
        for tiles in buckets.tiles
        if buckets.alone and buckets.alone.hold([tiles.count * tiles.width], width)
    ]
    if buckets.shared_rows:
        several = [s for s in shapes if s.parts[0].width == 1 and s.parts[0].count > 1]
        shapes += [shape._replace(shared_rows=buckets.shared_rows) for shape in several]
    return shapes


def verification_shapes(buckets: Buckets, max_width: int | None = None) -> list[StepShape]:
    """Returns the shapes of steps with drafts, as `all_shapes` does."""
    kinds = (False, True) if buckets.trees else (False,)
    return [
        shape_of_part(buckets, part, width, tree)
        for width in _widths(buckets, max_width)
        for part in buckets.verifications
        for tree in kinds
    ]


def _widths(buckets: Buckets, max_width: int | None) -> list[int]:
    widest = buckets.widths[-1]
    top = at_least(buckets.widths, min(max_width or widest, widest))
    return [width for width in buckets.widths if width <= top]
