"""Ladders of sizes for the shapes of steps: rows, tiles, tiles that verify drafts. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ksana_jax.core.config import EngineConfig
from ksana_jax.devices.tuning import tuning
from ksana_jax.scheduler.step.types import TileGroup, most_tiles

# Logits of this many tokens take hardly longer than one token's: the matrix that computes them is read once.
FEW_TOKENS = 16


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


def tile_parts(max_num_batched_tokens: int, query_tile: int, min_rows: int = 1) -> tuple[TileGroup, ...]:
    """Returns parts for longer chunks: wide tiles in a ladder of factors of two, all of the narrow ones or a quarter.

    Parts with fewer tokens come first; among equals, the widest tiles, which read keys for more queries at once.
    """
    found = []
    for count, width in most_tiles(max_num_batched_tokens, query_tile):
        fewest = -(-min_rows // width)
        most = max(count, fewest)
        counts = ladder(fewest, most) if width == query_tile else ladder(max(most // 4, fewest), most, 4.0)
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


def verified_sizes(parts: Iterable[TileGroup]) -> dict[int, int]:
    """Returns for each number of tokens of parts the number of computed logits, which takes fewer values: a
    program chooses tokens for all numbers from three quarters of its own number, or up to FEW_TOKENS, on."""
    found: dict[int, int] = {}
    size = 0
    for tokens in sorted({part.count * part.width for part in parts}, reverse=True):
        if (size > FEW_TOKENS and 4 * tokens < 3 * size) or not size:
            size = tokens
        found[tokens] = size
    return found
