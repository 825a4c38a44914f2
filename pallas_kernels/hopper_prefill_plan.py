"""What each query tile of a prefill reads, in which order: made once on the device, used by all layers that share a
pattern.

Of a tile's block table only the blocks with something visible are kept, the newest first; a piece is as many blocks as
fill PIECE tokens. The order of the pieces does not matter to a softmax, so those that need a mask come before those
that do not:

    blocks of 64, queries at 200..231      blocks 3 2 | 1 0
    only the first piece needs a mask, for 201..255; with a window of 150 the second one too, for 0..81

Slots that nobody has written lie beyond the newest query, hence in the first piece, and only there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.patterns import FAR, Pattern
from pallas_kernels.work import oldest_and_newest, placed

PIECE = 128  # tokens that are read together

# Columns of Plan.tiles.
NUM_PIECES, NUM_MASKED, DIRTY, NEWEST = range(4)


class Plan(NamedTuple):
    """Arrays int32. S query tiles, U blocks of a table, filled up to whole pieces.

    blocks: [S, U] index of a block in the pool seen as [M * L * 2 * K] blocks, without layer, key/value and head; any
      one of the tile's where absent.
    starts: [S, U] text position of each block's first slot; FAR where absent.
    tiles: [S, 4] pieces to read; the first so many of them that need a mask; whether the first one has slots that may
      hold anything; largest position of the queries, -1 where there are none.
    order: [S] tiles, those with most pieces first.
    """

    blocks: jax.Array
    starts: jax.Array
    tiles: jax.Array
    order: jax.Array


def plan(
    tables: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    pattern: Pattern,
    *,
    block_size: int,
    rows_per_block_id: int,
) -> Plan:
    """Chooses and orders the blocks of each tile.

    Args:
      tables: [S, P] block ids, by rising text position; any valid id where absent.
      starts: [S, P] text position of each block's first slot; FAR where absent.
      positions: [S, Q] of each tile's queries; -1 where padded.
      pattern: scalars.
      rows_per_block_id: blocks of the pool from one block id to the next: L * 2 * K.

    Raises:
      NotImplementedError: the block size is not 16, 32, 64 or 128.
    """
    if block_size not in (16, 32, 64, 128):
        raise NotImplementedError(f"blocks of {block_size} tokens; this kernel takes 16, 32, 64 or 128")
    s, per_piece = tables.shape[0], PIECE // block_size
    first, last = oldest_and_newest(positions)
    live = pattern.sees_some(first, last, starts, block_size) & (starts < FAR)
    count = live.sum(axis=1, keepdims=True)
    width = -(-tables.shape[1] // per_piece) * per_piece
    # The newest live one moves to the front; the others are sent beyond the end and dropped.
    place = jnp.where(live, count - jnp.cumsum(live, axis=1), width)
    blocks, starts = placed(place, width, tables * rows_per_block_id, starts)
    # The oldest one fills the last piece: all of its slots are written, unless it is in the first piece anyway.
    blocks = jnp.where(
        jnp.arange(width) < count, blocks, jnp.take_along_axis(blocks, jnp.maximum(count - 1, 0), axis=1)
    )

    num_pieces = -(-count // per_piece)
    here = jnp.arange(width // per_piece) < num_pieces
    unmasked = pattern.sees_all(first, last, starts, block_size).reshape(s, -1, per_piece).all(axis=2)
    order = jnp.argsort(jnp.where(here, unmasked, 2), axis=1, stable=True)
    dirty = (starts[:, :per_piece] + block_size - 1 > last).any(axis=1)

    def ordered(x):
        return jnp.take_along_axis(x.reshape(s, -1, per_piece), order[:, :, None], axis=1).reshape(s, width)

    numbers = [num_pieces[:, 0], (here & ~unmasked).sum(axis=1), dirty, last[:, 0]]
    return Plan(
        blocks=ordered(blocks).astype(jnp.int32),
        starts=ordered(starts),
        tiles=jnp.stack(numbers, axis=1).astype(jnp.int32),
        order=jnp.argsort(-num_pieces[:, 0], stable=True).astype(jnp.int32),
    )
