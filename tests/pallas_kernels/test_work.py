"""The work list: every live piece once, in equal stretches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.patterns import FAR, FULL, Pattern
from pallas_kernels.work import (
    DIRTY,
    HEAD,
    MASK,
    MIN_PIECES,
    NUM_PIECES,
    PIECE,
    REPOSITIONED,
    TILE,
    TILE_KV,
    schedule,
    stretches,
    unit_tokens,
)
from tests.soak import soak_unless

KV_HEADS, WIDTH = 2, 40
PATTERNS = {
    "full": FULL,
    "window": Pattern(window=33),
    "sinks": Pattern(window=50, num_sinks=5, sink_position=1),
    "dilated": Pattern(window=300, stride=70),
    "global": Pattern(window=20, has_global=1, global_every=90),
}


def rows(block_size, rng, width=1):
    """Tables, starts and positions of six rows of random lengths, one of them empty."""
    lengths = rng.integers(width, WIDTH * block_size + 1, 6)
    lengths[rng.integers(6)] = 0
    tables = rng.permutation(6 * WIDTH).reshape(6, WIDTH)
    starts = np.tile(np.arange(WIDTH) * block_size, (6, 1))
    starts = np.where(starts < lengths[:, None], starts, FAR)
    positions = np.where(lengths[:, None] > 0, lengths[:, None] - width + np.arange(width), -1)
    return tuple(jnp.asarray(x, jnp.int32) for x in (tables, starts, positions))


def make(arrays, pattern, block_size, num_workers):
    parts = block_size // unit_tokens(block_size)
    pattern = Pattern(*(jnp.int32(x) for x in pattern))
    work = jax.jit(schedule, static_argnames=("block_size", "num_kv_heads", "per_block_id", "num_workers"))(
        *arrays,
        pattern,
        block_size=block_size,
        num_kv_heads=KV_HEADS,
        per_block_id=parts,
        num_workers=num_workers,
    )
    return jax.tree.map(np.asarray, work)


@pytest.mark.parametrize("block_size", soak_unless(lambda size: size == 64, [16, 64, 128]))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_unit_with_something_visible_is_read_once_for_each_head(pattern, block_size):
    rng = np.random.default_rng(block_size)
    size = unit_tokens(block_size)
    per_piece = TILE_KV // size
    for num_workers in (1, 5, 200):
        for width in (1, 3):
            arrays = rows(block_size, rng, width)
            work = make(arrays, PATTERNS[pattern], block_size, num_workers)
            read = [
                (tile, head, int(start))
                for tile, head, first, count in work.segments
                for start in work.starts[tile, first * per_piece : (first + count) * per_piece]
                if start < FAR
            ]
            tables, starts, positions = (np.asarray(x) for x in arrays)
            expected = []
            slots = starts[:, :, None] + np.arange(block_size)
            seen = PATTERNS[pattern].visible(positions[:, :, None, None], np.minimum(slots, FAR)[:, None])
            seen = np.asarray(seen).any(axis=1).reshape(len(tables), -1, size).any(axis=2)
            for tile, unit in zip(*np.nonzero(seen)):
                block, part = divmod(unit, block_size // size)
                start = starts[tile, block] + part * size
                (at,) = np.flatnonzero(work.starts[tile] == start)
                assert work.units[tile, at] == tables[tile, block] * (block_size // size) + part
                assert work.place[tile, unit] == at
                expected += [(tile, head, start) for head in range(KV_HEADS)]
            assert sorted(read) == sorted(expected)
            assert (work.place[~seen] == work.units.shape[1]).all()


def test_a_long_row_is_shared_out_evenly_among_workers():
    starts = np.full((4, 64), FAR, np.int32)
    starts[0] = np.arange(64) * 64
    starts[1:, 0] = 0
    positions = np.array([[64 * 64 - 1], [10], [63], [-1]], np.int32)
    work = make((jnp.zeros((4, 64), jnp.int32), jnp.asarray(starts), jnp.asarray(positions)), FULL, 64, 13)
    counts = [work.segments[a:b, NUM_PIECES].sum() for a, b in zip(work.first, work.first[1:])]
    # 2 heads of 64 + 1 + 1 pieces: 132 among 13.
    assert sum(counts) == 132 and max(counts) == 11 and counts[:12] == [11] * 12


def test_short_rows_are_not_cut_into_crumbs():
    arrays = (jnp.zeros((1, 4), jnp.int32), jnp.arange(4, dtype=jnp.int32)[None] * 64, jnp.full((1, 1), 255, jnp.int32))
    work = make(arrays, FULL, 64, 264)
    assert work.segments[:KV_HEADS].tolist() == [[0, 0, 0, MIN_PIECES], [0, 1, 0, MIN_PIECES]]


def test_segments_follow_one_another_and_belong_to_their_pair_and_worker():
    work = make(rows(16, np.random.default_rng(3)), FULL, 16, 9)
    used = work.segments[: work.first[-1]]
    assert (work.segments[work.first[-1] :, NUM_PIECES] == 0).all() and (used[:, NUM_PIECES] > 0).all()
    for pair, (a, b) in enumerate(zip(work.of_pair, work.of_pair[1 : 6 * KV_HEADS + 1])):
        own = work.segments[a:b]
        assert (own[:, TILE] * KV_HEADS + own[:, HEAD] == pair).all()
        assert own[:, PIECE].tolist() == (np.cumsum(own[:, NUM_PIECES]) - own[:, NUM_PIECES]).tolist()


def test_only_pieces_that_need_care_are_marked():
    starts = np.arange(4, dtype=np.int32)[None] * 64
    arrays = (jnp.zeros((1, 4), jnp.int32), jnp.asarray(starts), jnp.full((1, 1), 200, jnp.int32))
    assert make(arrays, FULL, 64, 1).care.tolist() == [[0, 0, 0, MASK | DIRTY]]
    # The window begins within the second piece.
    assert make(arrays, Pattern(window=100), 64, 1).care[0, :3].tolist() == [MASK, 0, MASK | DIRTY]
    found = make(arrays, Pattern(window=137, num_sinks=4, sink_position=1), 64, 1)
    assert found.care.tolist() == [[MASK | REPOSITIONED, 0, 0, MASK | DIRTY]]


def test_segments_are_those_between_sorted_begins_of_pairs_and_cuts():
    rng, num_heads, num_workers = np.random.default_rng(7), 3, 6
    cut = jax.jit(stretches, static_argnums=(1, 2))
    for most in (0, 1, 5, 60, 900):
        pieces = rng.integers(0, most + 1, 5) * (rng.random(5) < 0.7)
        begin = np.concatenate([[0], np.cumsum(np.repeat(pieces, num_heads))])
        total = int(begin[-1])
        stretch = max(-(-total // num_workers), MIN_PIECES)
        cuts = np.minimum(np.arange(num_workers + 1) * stretch, total)
        edges = np.unique(np.concatenate([begin, cuts]))
        pair = np.searchsorted(begin, edges[:-1], side="right") - 1
        expected = np.stack([pair // num_heads, pair % num_heads, edges[:-1] - begin[pair], np.diff(edges)], axis=1)
        segments, first, of_pair = map(np.asarray, cut(jnp.asarray(pieces, jnp.int32), num_heads, num_workers))
        np.testing.assert_array_equal(segments[: len(expected)], expected)
        assert not segments[len(expected) :, NUM_PIECES].any()
        # Both are as long as the longer one, and go on with the number of segments.
        assert len(first) == len(of_pair) == max(len(cuts), len(begin))
        for found, places in ((first, cuts), (of_pair, begin)):
            np.testing.assert_array_equal(found[: len(places)], np.searchsorted(edges, places))
            assert (found[len(places) :] == len(expected)).all()
