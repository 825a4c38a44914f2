"""Order of the reads of each query tile of a prefill: computed once on the device, used by all layers that share a
pattern.

Only the blocks of a tile's table with something visible are kept, cut into units of at most 64 tokens, the newest
first; a piece is as many units as fill `piece_tokens`. The order of the pieces does not matter to a softmax, so those
that need a mask come before those that do not:

    blocks of 64, queries at 200..231      blocks 3 2 | 1 0
    only the first piece needs a mask, for 201..255; with a window of 150 the second one too, for 0..81

A tile may be split over its pieces, into work for as many blocks of threads, whose results are merged.

Unwritten slots are beyond the newest query, hence in the first piece, and only there. Sinks that a second
query scores are the oldest keys, hence in the last of the pieces that need a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.patterns import Pattern
from pallas_kernels.work import placed, unit_tokens, units_of

# Columns of PrefillWork.tiles.
TILE, NUM_PIECES, NUM_MASKED, FIRST_REPOSITIONED, DIRTY, NEWEST, SPLIT = range(7)
MULTIPROCESSORS = 132  # of an H100 and an H200: blocks of threads that run at once
LEAST_PIECES = 4  # of a split


def piece_tokens(head_dim: int) -> int:
    """Tokens that are read together: half as many where the output takes more than half of a consumer's registers."""
    return 128 if head_dim <= 128 else 64


def splits_of(num_tiles: int, num_kv_heads: int, width: int, *, block_size: int, head_dim: int) -> int:
    """Splits of each tile over its keys, so that few tiles over long tables of `width` blocks keep the chip busy."""
    most = width * block_size // (piece_tokens(head_dim) * LEAST_PIECES)
    return max(1, min(MULTIPROCESSORS // (num_tiles * num_kv_heads), most))


class PrefillWork(NamedTuple):
    """Arrays int32. S splits of query tiles, those with most pieces first; U units of a split, filled up to pieces.

    units: [S, U] index of a unit in the pool seen as units, without layer, key/value and head; any one of the tile's
      where absent.
    starts: [S, U] text position of each unit's first slot; FAR where absent.
    tiles: [S, 7] number of the query tile; pieces to read; how many of these need a mask, which come first; the first
      of those with sinks that a sink query scores; whether the first piece has unwritten slots; largest position
      of the queries, -1 without any; number of the tile's split.
    """

    units: jax.Array
    starts: jax.Array
    tiles: jax.Array


def schedule(
    tables: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    pattern: Pattern,
    *,
    block_size: int,
    head_dim: int,
    per_block_id: int,
    splits: int = 1,
) -> PrefillWork:
    """Chooses and orders the blocks of each tile.

    Args:
      tables: [S, P] block ids, by rising text position; any valid id where absent.
      starts: [S, P] text position of each block's first slot; FAR where absent.
      positions: [S, Q] of each tile's queries; -1 where padded.
      pattern: scalars.
      per_block_id: from `units_per_block_id`.
      splits: of each tile over its keys; its pieces are dealt to them round robin.

    Raises:
      NotImplementedError: the block size is not 16, 32, 64 or 128.
    """
    size = unit_tokens(block_size)
    s, per_piece = tables.shape[0], piece_tokens(head_dim) // size
    units, starts, live, first, last = units_of(tables, starts, positions, pattern, block_size, per_block_id)
    count = live.sum(axis=1, keepdims=True)
    width = -(-units.shape[1] // per_piece) * per_piece
    # The newest live one moves to the front; the others are sent beyond the end and dropped.
    place = jnp.where(live, count - jnp.cumsum(live, axis=1), width)
    units, starts = placed(place, width, units, starts)
    # The oldest one fills the last piece: all of its slots are written, unless it is in the first piece anyway.
    units = jnp.where(jnp.arange(width) < count, units, jnp.take_along_axis(units, jnp.maximum(count - 1, 0), axis=1))

    num_pieces = -(-count // per_piece)
    here = jnp.arange(width // per_piece) < num_pieces
    unmasked = pattern.sees_all(first, last, starts, size).reshape(s, -1, per_piece).all(axis=2)
    repositioned = pattern.repositioned(last, starts).reshape(s, -1, per_piece).any(axis=2)
    order = jnp.argsort(jnp.where(here, unmasked, 2), axis=1, stable=True)
    dirty = (starts[:, :per_piece] + size - 1 > last).any(axis=1)

    num_masked = (here & ~unmasked).sum(axis=1, keepdims=True)
    first_repositioned = num_masked - repositioned.sum(axis=1, keepdims=True)
    split = jnp.arange(splits)

    def shares(count):
        return -((split - count) // splits)

    dirty = dirty[:, None] & (split == 0)
    numbers = [jnp.arange(s)[:, None], *map(shares, (num_pieces, num_masked, first_repositioned)), dirty, last, split]
    tiles = jnp.stack([jnp.broadcast_to(x, (s, splits)) for x in numbers], axis=2).astype(jnp.int32)
    tiles = tiles.reshape(s * splits, -1)
    longest_first = jnp.argsort(-tiles[:, NUM_PIECES], stable=True)

    def ordered(x):
        x = jnp.take_along_axis(x.reshape(s, -1, per_piece), order[:, :, None], axis=1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % splits), (0, 0)))  # never read
        x = jnp.moveaxis(x.reshape(s, -1, splits, per_piece), 2, 1).reshape(s * splits, -1)
        return x[longest_first].astype(jnp.int32)

    return PrefillWork(units=ordered(units), starts=ordered(starts), tiles=tiles[longest_first])
