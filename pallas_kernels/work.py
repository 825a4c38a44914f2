"""The work list of a step, cut into equal parts: built once on the device, for all layers that share a pattern.

A query tile is a few queries of one row, for example the one token of a decoding row. Only the blocks of its table
with something visible are kept, cut into units of at most 64 tokens; units are read TILE_KV tokens at a time:

    tile 0   blocks  0 1 . . . . 6 7    window and a sink: blocks 2 to 5 are not read
    tile 1   blocks  0 1 2

All (query tile, kv head) pairs form one line, each as long as its number of pieces of TILE_KV tokens. The line is cut
into one equal stretch for each worker; where a cut falls inside a pair, the pair has two segments, whose results are
merged. So one row of 128k tokens among short ones keeps all workers busy, whatever the batch.

Source: balanced work lists for ragged attention, FlashInfer, arXiv:2501.01005, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.patterns import FAR, Pattern

TILE_KV = 64
# Shorter stretches are not worth a separate segment: 4 pieces of 64 tokens.
MIN_PIECES = 4

# Columns of Work.segments.
TILE, HEAD, PIECE, NUM_PIECES = range(4)

# Bits of Work.care: some query does not see some slot with its own query; some slot is beyond the newest query and
# may hold anything; some slot is a repositioned sink, which a sink query scores.
MASK, DIRTY, REPOSITIONED = 1, 2, 4


def unit_tokens(block_size: int) -> int:
    """Returns the tokens that one copy reads: a block, or half a block of 128.

    Raises:
      NotImplementedError: the block size is not 16, 32, 64 or 128.
    """
    if block_size not in (16, 32, 64, 128):
        raise NotImplementedError(f"blocks of {block_size} tokens; these kernels take 16, 32, 64 or 128")
    return min(block_size, TILE_KV)


class Work(NamedTuple):
    """A work list as int32 arrays. S query tiles, K kv heads, U units of a table, W workers, N = S*K + W segments.

    units: [S, U] index of a unit in the pool seen as units, without layer, head and key/value; the live ones first.
    starts: [S, U] text position of each unit's first slot; FAR where absent.
    care: [S, U / units per piece] needs of a piece, as bits MASK, DIRTY, REPOSITIONED.
    newest: [S] largest position of each tile's queries; -1 without any.
    segments: [N, 4] query tile, kv head, first piece, number of pieces; 0 pieces where absent.
    first: [R] each worker's first segment. R = max(S*K, W) + 1.
    of_pair: [R] each pair's first segment; pairs are in the order of segments. Beyond the last worker and the last
      pair, both are the number of segments.
    place: [S, units of a table] index of each of the table's units in `units`; U if it is not live.
    """

    units: jax.Array
    starts: jax.Array
    care: jax.Array
    newest: jax.Array
    segments: jax.Array
    first: jax.Array
    of_pair: jax.Array
    place: jax.Array

    def num_workers(self, num_kv_heads: int) -> int:
        return len(self.segments) - len(self.units) * num_kv_heads


def units_per_block_id(pool_shape) -> int:
    """Returns the number of units of a pool [M, L, 2, K, B, H] from one block id to the next."""
    _, num_layers, two, num_kv_heads, block_size, _ = pool_shape
    return num_layers * two * num_kv_heads * (block_size // unit_tokens(block_size))


def split_tiles(tables, starts, positions, queries: int):
    """Cuts query tiles [S, Q] into tiles of at most `queries` queries, each with its row's tables [S, P] and starts."""
    s, width = positions.shape
    per_tile = min(queries, width)
    tiles = -(-width // per_tile)
    positions = jnp.pad(positions, ((0, 0), (0, tiles * per_tile - width)), constant_values=-1)
    positions = positions.reshape(s * tiles, per_tile)
    return jnp.repeat(tables, tiles, axis=0), jnp.repeat(starts, tiles, axis=0), positions


class Units(NamedTuple):
    """Units of block tables, cut out of blocks. U = P x units of a block.

    index: [S, U] in the pool seen as units, without layer, head and key/value. starts: [S, U] first text position; FAR
    where absent. live: [S, U] True if some query sees some of it. first, last: [S, 1] smallest and largest position of
    the queries; FAR and -1 without any.
    """

    index: jax.Array
    starts: jax.Array
    live: jax.Array
    first: jax.Array
    last: jax.Array


def units_of(tables, starts, positions, pattern: Pattern, block_size: int, per_block_id: int) -> Units:
    """Returns the units of tables [S, P] with starts [S, P], for queries at positions [S, Q].

    Args:
      per_block_id: as `units_per_block_id` gives it.
    """
    size = unit_tokens(block_size)
    parts = jnp.arange(block_size // size)
    index = ((tables * per_block_id)[:, :, None] + parts).reshape(len(tables), -1)
    starts = jnp.where(starts[:, :, None] < FAR, starts[:, :, None] + size * parts, FAR).reshape(len(tables), -1)
    first = jnp.where(positions < 0, FAR, positions).min(axis=1, keepdims=True)
    last = positions.max(axis=1, keepdims=True)
    live = pattern.sees_some(first, last, starts, size) & (starts < FAR)
    return Units(index, starts, live, first, last)


def placed(place, width: int, blocks, starts):
    """Moves blocks and their starts [S, U] to other places in rows of `width`; those sent to `width` are dropped."""
    row = jnp.arange(len(place))[:, None]
    blocks = jnp.zeros((len(place), width), jnp.int32).at[row, place].set(blocks, mode="drop")
    return blocks, jnp.full((len(place), width), FAR, jnp.int32).at[row, place].set(starts, mode="drop")


def schedule(
    tables: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    pattern: Pattern,
    *,
    block_size: int,
    num_kv_heads: int,
    per_block_id: int,
    num_workers: int,
) -> Work:
    """Cuts a step's attention into equal stretches.

    Args:
      tables: [S, P] block ids, by rising text position; any valid id where absent.
      starts: [S, P] text position of each block's first slot; FAR where absent.
      positions: [S, Q] of each tile's queries; -1 where padded.
      pattern: scalars.
      per_block_id: as `units_per_block_id` gives it.
      num_workers: stretches to cut the work into.
    """
    s = tables.shape[0]
    size = unit_tokens(block_size)
    per_piece = TILE_KV // size
    units, unit_starts, live, first, last = units_of(tables, starts, positions, pattern, block_size, per_block_id)
    num_units = units.shape[1]
    width = -(-num_units // per_piece) * per_piece
    before = jnp.arange(num_units)
    reached = jnp.sum(live[:, None, :] & (before <= before[:, None]), axis=2, dtype=jnp.int32)
    count = reached[:, -1]
    # The live ones move to the front: the p-th of them is the first at which more than p are reached.
    nth = jnp.arange(width)
    source = jnp.sum(reached[:, None, :] <= nth[:, None], axis=2, dtype=jnp.int32)
    there = nth < count[:, None]

    def moved(x, otherwise: int):
        return jnp.where(there, jnp.take_along_axis(x, jnp.minimum(source, num_units - 1), axis=1), otherwise)

    place = jnp.where(live, reached - 1, width)
    units, unit_starts = moved(units, 0).astype(jnp.int32), moved(unit_starts, FAR)
    repositioned = (pattern.sink_position != 0) & (unit_starts < pattern.num_sinks)
    needs = (
        (MASK, ~pattern.sees_all(first, last, unit_starts, size)),
        (DIRTY, unit_starts + size - 1 > last),
        (REPOSITIONED, repositioned),
    )
    care = jnp.zeros((s, width // per_piece), jnp.int32)
    for bit, x in needs:
        care |= bit * x.reshape(s, -1, per_piece).any(axis=2)

    segments, first_of_worker, of_pair = stretches(-(-count // per_piece), num_kv_heads, num_workers)
    return Work(units, unit_starts, care, last[:, 0], segments, first_of_worker, of_pair, place.astype(jnp.int32))


def stretches(pieces, num_kv_heads: int, num_workers: int):
    """Returns segments, first and of_pair of a `Work`, from each tile's number of pieces [S].

    On a GPU, sorts, scans and binary searches are several kernels each. Here each step is a sum over comparisons, of
    one kernel, as are several of one shape; divisions come first, so that XLA finds the sums cheap enough
    to fuse.
    """
    num_tiles = len(pieces)
    num_pairs = num_tiles * num_kv_heads
    pair = jnp.arange(num_pairs + 1)
    tile, head = lax.div(pair, num_kv_heads), lax.rem(pair, num_kv_heads)
    others = jnp.arange(num_tiles)
    # Pieces in the line before a pair (all heads of earlier tiles, and earlier heads of its tile), and from there on.
    heads_before = jnp.where(others < tile[:, None], num_kv_heads, jnp.where(others == tile[:, None], head[:, None], 0))
    begin, rest = (
        jnp.sum(pieces * heads, axis=1, dtype=jnp.int32) for heads in (heads_before, num_kv_heads - heads_before)
    )
    begins, ends, total = begin[:-1], begin[1:], (begin + rest)[:-1]
    # The same for all pairs. For one number XLA would make a separate kernel.
    stretch = jnp.maximum(-(-total // num_workers), MIN_PIECES)
    # Cuts are at multiples of the stretch: for each pair, the last one up to its begin, the first one from its end on.
    last_cut, end_cut = lax.div(begins, stretch), lax.div(ends + stretch - 1, stretch)
    num_segments = jnp.where(begins < ends, end_cut - last_cut, 0)
    row = jnp.arange(max(num_pairs, num_workers) + 1)[:, None]
    of_pair = jnp.sum(jnp.where(pair[:-1] < row, num_segments, 0), axis=1, dtype=jnp.int32)
    # Before a worker's cut are all segments of the pairs that end there, and its own pair's up to there.
    up_to_cut = jnp.clip(row, last_cut, last_cut + num_segments) - last_cut
    first = jnp.sum(up_to_cut, axis=1, dtype=jnp.int32)
    # A pair's first segment begins with it, the others at the cuts within it. Rows beyond the last segment belong to
    # the last pair, without pieces.
    number = jnp.arange(num_pairs + num_workers)[:, None]
    there, is_last = number < of_pair[num_pairs], pair[:-1] == num_pairs - 1
    owns = (of_pair[:num_pairs] <= number) & ((number < of_pair[1 : num_pairs + 1]) | is_last)
    nth = number - of_pair[:num_pairs]
    cut = (last_cut + nth) * stretch
    start = jnp.where(nth == 0, begins, cut)
    length = jnp.where(there, jnp.minimum(cut + stretch, ends) - start, 0)
    piece = jnp.where(there, start, total) - begins
    columns = jnp.stack(jnp.broadcast_arrays(tile[:-1], head[:-1], piece, length), axis=1)
    return jnp.sum(jnp.where(owns[:, None], columns, 0), axis=2, dtype=jnp.int32), first, of_pair
