"""The Hopper kernel for many queries, run by jax's interpreter of GPU programs on the CPU, against the reference."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arguments import DILATED, GLOBAL, SINKS, SINKS_AT_CEILING, WINDOW, Spec, layout, make
from pallas_kernels.contract import Kernel
from pallas_kernels.hopper import prefill
from pallas_kernels.hopper.prefill_work import NEWEST, NUM_PIECES, SPLIT, TILE, piece_tokens, schedule, splits_of
from pallas_kernels.patterns import FAR, Pattern
from tests.pallas_kernels.contract import check, expect_unsupported_is_named
from tests.pallas_kernels.interpreter import PARAMS, interpreting, several_warpgroups
from tests.soak import soak_unless

KERNEL = prefill.KERNEL.tuned(interpret=PARAMS)
# Each compiles anew: the interpreter of jax 0.10 cannot run the same program twice.
SPECS = (
    # 128 rows to a tile; the chunk's second tile is partly padded; one row is empty.
    Spec(rows=((290, 36), (0, 0)), q_tile=32, num_kv_heads=1, block_size=32, sink_logits=True, return_lse=True),
    Spec(rows=((290, 31),), q_tile=32, num_heads=8, head_dim=128, block_size=64, soft_cap=15.0, pattern=SINKS),
    # Tiles of more queries than 128 rows hold, a group of 3 whose 63 rows are padded, blocks as long as a piece.
    Spec(
        rows=((290, 45),),
        q_tile=45,
        num_heads=3,
        num_kv_heads=1,
        head_dim=96,
        block_size=128,
        dtype="float16",
        pattern=DILATED,
    ),
    # A sink query for all sinks, after which the first one attends to a piece without a mask; pieces of half a block.
    Spec(
        rows=((150, 16),),
        q_tile=16,
        num_kv_heads=1,
        head_dim=256,
        block_size=128,
        return_lse=True,
        pattern=Pattern(num_sinks=4, sink_position=1),
        sink_queries=1,
    ),
    # Three sink queries for six sinks, which some of the queries score with them.
    Spec(rows=((80, 40),), q_tile=40, num_heads=2, num_kv_heads=1, pattern=SINKS_AT_CEILING, sink_queries=3),
)
# Keys and values in 8 and 4 bits: slots that nobody has written, scales with gaps between units of 16 tokens, sinks.
QUANTISED = (
    Spec(rows=((150, 20),), q_tile=20, num_kv_heads=1, codes="int8", sink_logits=True, return_lse=True, evict_every=3),
    Spec(
        rows=((290, 31),),
        q_tile=32,
        num_heads=4,
        num_kv_heads=1,
        head_dim=128,
        block_size=64,
        codes="float8_e4m3fn",
        soft_cap=15.0,
        pattern=SINKS,
        return_lse=True,
    ),
    Spec(rows=((150, 20),), q_tile=20, num_kv_heads=1, block_size=64, head_dim=128, codes="int4"),
    Spec(
        rows=((80, 20),),
        q_tile=20,
        num_kv_heads=1,
        head_dim=96,
        block_size=32,
        codes="float8_e4m3fn",
        pattern=SINKS_AT_CEILING,
        sink_queries=3,
    ),
)


@several_warpgroups
@pytest.mark.parametrize("spec", [*SPECS, *QUANTISED], ids=str)
def test_the_prefill_kernel_equals_the_reference_without_races(spec):
    with interpreting():
        check(KERNEL, spec)


@several_warpgroups
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[4]], ids=str)
def test_splits_of_a_tile_are_merged(spec):
    with interpreting():
        check(KERNEL.tuned(splits=3), spec)


@several_warpgroups
def test_layers_can_share_one_work_list():
    def attend(call, work, *, tuning):
        work = KERNEL.work(call)
        # Without a table nothing but the work list says where the keys are.
        call = call.replace(tables=jnp.zeros_like(call.tables), starts=jnp.zeros_like(call.starts))
        return KERNEL(call, work)

    spec = Spec(rows=((150, 20),), q_tile=20, num_kv_heads=1, evict_every=3, pattern=GLOBAL)
    with interpreting():
        check(Kernel(attend, None), dataclasses.replace(spec, return_lse=True))


@pytest.mark.parametrize("pattern", [Pattern(), WINDOW, SINKS, SINKS_AT_CEILING, DILATED, GLOBAL], ids=str)
@pytest.mark.parametrize(
    ("block_size", "head_dim"), soak_unless(lambda size: size == (128, 256), [(16, 64), (128, 128), (128, 256)])
)
def test_the_work_list_has_what_is_seen_and_masks_what_is_not_seen_by_all(pattern, block_size, head_dim):
    spec = Spec(rows=((700, 70), (0, 0), (3, 3)), q_tile=32, block_size=block_size, evict_every=4, pattern=pattern)
    tables, starts, positions, _ = layout(spec)
    arrays = (jnp.asarray(tables), jnp.asarray(starts), jnp.asarray(positions))
    work = schedule(*arrays, pattern, block_size=block_size, head_dim=head_dim, per_block_id=10)
    size = min(block_size, 64)
    per_piece = piece_tokens(head_dim) // size
    for units, begin, numbers in zip(*(np.asarray(x).tolist() for x in work)):
        tile, num_pieces, num_masked, first_repositioned, dirty, newest, _ = numbers
        queries = positions[tile][positions[tile] >= 0]

        def marked(start, by, queries=queries):
            return np.asarray(by(queries[:, None], start + np.arange(size)))

        table = [
            (t * 10 + i, s + i * size)
            for t, s in zip(tables[tile].tolist(), starts[tile].tolist())
            if s < FAR
            for i in range(block_size // size)
        ]
        live = {(unit, s) for unit, s in table if marked(s, pattern.visible).any()}
        count = num_pieces * per_piece
        assert {x for x in zip(units[:count], begin) if x[1] < FAR} == live
        assert newest == (queries.max() if len(queries) else -1)
        assert set(units[:count]) <= {unit for unit, _ in live}
        assert first_repositioned <= num_masked <= num_pieces
        for piece in range(num_pieces):
            part = [s for s in begin[piece * per_piece : (piece + 1) * per_piece] if s < FAR]
            full = len(part) == per_piece and all(marked(s, pattern.visible).all() for s in part)
            repositioned = any(marked(s, pattern.repositioned).any() for s in part)
            assert piece < num_masked or (full and not repositioned)
            assert repositioned == (first_repositioned <= piece < num_masked)
            unwritten = any(s + size - 1 > newest for s in part)
            assert not unwritten or (piece == 0 and dirty)
    tiles = np.asarray(work.tiles)
    assert sorted(tiles[:, TILE]) == list(range(len(positions)))
    assert (np.diff(tiles[:, NUM_PIECES]) <= 0).all() and tiles[:, NEWEST].max() == 699


@pytest.mark.parametrize("pattern", [SINKS_AT_CEILING, GLOBAL], ids=str)
def test_splits_of_a_tile_take_its_pieces_in_turn(pattern):
    spec = Spec(rows=((700, 70), (0, 0), (300, 3)), q_tile=32, block_size=32, evict_every=4, pattern=pattern)
    tables, starts, positions, _ = layout(spec)
    arrays = (jnp.asarray(tables), jnp.asarray(starts), jnp.asarray(positions))
    whole, split = (
        schedule(*arrays, pattern, block_size=32, head_dim=64, per_block_id=1, splits=splits) for splits in (1, 3)
    )
    tiles = {numbers[TILE]: i for i, numbers in enumerate(np.asarray(whole.tiles).tolist())}
    units, begin = (np.asarray(x).reshape(len(tiles), -1, 4) for x in whole[:2])  # by piece
    for found, first, numbers in zip(*(np.asarray(x) for x in split)):
        i, j = tiles[numbers[TILE]], numbers[SPLIT]
        of_tile = np.asarray(whole.tiles)[i]
        counts = [len(range(j, count, 3)) for count in of_tile[1:4]]
        assert numbers.tolist() == [of_tile[TILE], *counts, of_tile[4] and j == 0, of_tile[NEWEST], j]
        pieces = range(j, of_tile[NUM_PIECES], 3)
        assert found[: 4 * len(pieces)].tolist() == units[i, pieces].ravel().tolist()
        assert first[: 4 * len(pieces)].tolist() == begin[i, pieces].ravel().tolist()
    assert len(split.tiles) == 3 * len(tiles) and (np.diff(np.asarray(split.tiles)[:, NUM_PIECES]) <= 0).all()


def test_few_tiles_over_many_keys_are_split():
    shape = {"block_size": 64, "head_dim": 128}
    assert splits_of(4, 8, 512, **shape) == 4  # a chunk of 128 tokens in a text of 32k: 128 of 132 multiprocessors
    assert splits_of(256, 8, 128, **shape) == 1
    assert splits_of(1, 1, 16, **shape) == 2  # of four pieces at least


def test_what_the_kernel_lacks_is_named():
    expect_unsupported_is_named(KERNEL, Spec(rows=((5, 5),), q_tile=32))
    with pytest.raises(NotImplementedError, match="codes with a head dim of 256"):
        KERNEL(make(Spec(rows=((5, 5),), q_tile=32, head_dim=256, codes="int8")))
