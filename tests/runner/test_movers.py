"""Copies of whole blocks, in every size of a group and in the order that `kv.moves.Moves` promises."""

import jax
import numpy as np
import pytest

from ksana_jax.core.patterns import FULL
from ksana_jax.kv.layout import KVGroup, KVLayout, Leaf
from ksana_jax.kv.moves import Moves
from ksana_jax.kv.visible_range import VisibleRange
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.movers import NUM_TIMED, SIZES, BlockMover

# Keys and values [L, 2, K, B, H] of a block with scales [L, 2, K]: whatever else a block has moves along.
LEAVES = (Leaf("kv", (2, 2, 1, 4, 2), "float32"), Leaf("scale", (2, 2, 1), "float16"))
LAYOUT = KVLayout((KVGroup((0, 1), VisibleRange.of([FULL] * 2)),), 4, LEAVES)
NUM_BLOCKS, NUM_SLOTS = 150, 140
COUNTS = sorted({0, 1, 2, *(s + d for s in SIZES for d in (-1, 0, 1)), 2 * SIZES[-1], 2 * SIZES[-1] + 3})


@pytest.fixture(scope="module", params=["none", "pinned_host"])
def mover(request) -> BlockMover:
    """Straight to NumPy, as on a CPU, and through pinned memory, as on CUDA and TPU; the CPU has that memory too."""
    return BlockMover(LAYOUT, NUM_BLOCKS, NUM_SLOTS, staging=request.param)


def pool() -> KVCache:
    """Every block filled with its number."""
    return jax.tree.map(lambda leaf: leaf + numbered(NUM_BLOCKS, leaf), make_cache(LAYOUT, NUM_BLOCKS))


def numbered(count: int, leaf) -> np.ndarray:
    return np.arange(count).reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)


def fill_host(mover: BlockMover) -> None:
    """Every slot full of 1000 + its number."""
    for leaf in LAYOUT.split(mover.host_blocks).values():
        leaf[:] = 1000 + numbered(NUM_SLOTS, leaf)


def numbers(blocks: KVCache | np.ndarray) -> np.ndarray:
    """The number that each block of the pool or of the host is full of."""
    leaves = blocks.leaves if isinstance(blocks, KVCache) else LAYOUT.split(blocks)
    assert set(leaves) == {"kv", "scale"}
    flat = np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in leaves.values()], axis=1)
    assert (flat == flat[:, :1]).all(), "a block is half copied"
    return flat[:, 0].astype(int)


def pairs(*given) -> np.ndarray:
    return np.array(given, np.int32).reshape(-1, 2)


def make(mover: BlockMover, cache: KVCache, saves=None, copies=None, loads=None) -> KVCache:
    none = pairs()
    moves = Moves(*(none if given is None else given for given in (saves, copies, loads)))
    cache, saved, _ = mover.start(cache, moves)
    mover.finish(saved)
    return cache


def some(rng, sources: int, targets: int, count: int) -> np.ndarray:
    """Random pairs; two never have one target."""
    return np.stack([rng.integers(0, sources, count), rng.permutation(targets)[:count]], axis=1).astype(np.int32)


@pytest.mark.parametrize("count", COUNTS)
def test_blocks_are_saved_copied_and_loaded_in_groups_of_every_size(mover, count):
    rng = np.random.default_rng(count)
    fill_host(mover)
    saves = some(rng, NUM_BLOCKS, NUM_SLOTS, count)
    make(mover, pool(), saves=saves)
    expected = 1000 + np.arange(NUM_SLOTS)
    expected[saves[:, 1]] = saves[:, 0]
    assert numbers(mover.host_blocks).tolist() == expected.tolist()

    fill_host(mover)
    loads = some(rng, NUM_SLOTS, NUM_BLOCKS, count)
    expected = np.arange(NUM_BLOCKS)
    expected[loads[:, 1]] = 1000 + loads[:, 0]
    assert numbers(make(mover, pool(), loads=loads)).tolist() == expected.tolist()

    copies = some(rng, NUM_BLOCKS, NUM_BLOCKS, count)
    expected = np.arange(NUM_BLOCKS)
    expected[copies[:, 1]] = copies[:, 0]
    assert numbers(make(mover, pool(), copies=copies)).tolist() == expected.tolist()


@pytest.mark.parametrize("count", [1, 9, 130])
def test_blocks_are_read_and_written_as_bytes_of_the_host(mover, count):
    ids = np.random.default_rng(count).permutation(NUM_BLOCKS)[:count].astype(np.int32)
    cache, blocks = pool(), mover.read(pool(), ids)
    assert blocks.shape == (count, LAYOUT.block_bytes) and numbers(blocks).tolist() == ids.tolist()
    expected = np.arange(NUM_BLOCKS)
    expected[ids] = ids[::-1]
    assert numbers(mover.write(cache, ids, blocks[::-1].copy())).tolist() == expected.tolist()


@pytest.mark.parametrize("count", [2, 8, 64, 65, 130, 150])
def test_of_copies_all_are_read_before_one_is_written(mover, count):
    ring = np.arange(count, dtype=np.int32)
    expected = np.arange(NUM_BLOCKS)
    expected[np.roll(ring, -1)] = ring
    copies = np.stack([ring, np.roll(ring, -1)], axis=1)
    assert numbers(make(mover, pool(), copies=copies)).tolist() == expected.tolist()


def test_saves_come_first_then_copies_then_loads(mover):
    fill_host(mover)
    # Block 1 is saved, overwritten by a copy of 2; 2 and 4 are saved, and overwritten from the host.
    cache = make(mover, pool(), pairs((1, 7), (2, 8)), pairs((2, 1), (4, 3)), pairs((5, 2), (6, 4)))
    assert numbers(mover.host_blocks)[[7, 8]].tolist() == [1, 2]
    assert numbers(cache)[:6].tolist() == [0, 2, 1005, 4, 1006, 5]


@pytest.mark.parametrize("count", [1, 9, 64, 100])
def test_what_is_saved_can_be_loaded_at_once(mover, count):
    fill_host(mover)
    blocks = np.arange(count, dtype=np.int32)
    cache = make(
        mover, pool(), saves=np.stack([blocks, blocks], 1), loads=np.stack([blocks, NUM_BLOCKS - 1 - blocks], 1)
    )
    expected = np.arange(NUM_BLOCKS)
    expected[NUM_BLOCKS - 1 - blocks] = blocks
    assert numbers(cache).tolist() == expected.tolist()


def test_random_moves_are_those_of_numpy(mover):
    rng = np.random.default_rng(1)
    cache = pool()
    fill_host(mover)
    device, host = numbers(cache), numbers(mover.host_blocks)
    for _ in range(12):
        counts = rng.integers(0, 12, 3)
        saves = some(rng, NUM_BLOCKS, NUM_SLOTS, counts[0])
        targets = some(rng, 1, NUM_BLOCKS, counts[1] + counts[2])[:, 1]
        copies = np.stack([rng.integers(0, NUM_BLOCKS, counts[1]), targets[: counts[1]]], 1).astype(np.int32)
        loads = np.stack([rng.integers(0, NUM_SLOTS, counts[2]), targets[counts[1] :]], 1).astype(np.int32)
        cache = make(mover, cache, saves, copies, loads)
        host[saves[:, 1]] = device[saves[:, 0]]
        device[copies[:, 1]] = device[copies[:, 0]]
        device[loads[:, 1]] = host[loads[:, 0]]
        assert numbers(cache).tolist() == device.tolist()
        assert numbers(mover.host_blocks).tolist() == host.tolist()


def test_the_pool_is_donated_and_a_save_alone_leaves_it(mover):
    cache = pool()
    saved = make(mover, cache, saves=pairs((0, 0)))
    assert saved.kv is cache.kv and not cache.kv.is_deleted()
    copied = make(mover, cache, copies=pairs((0, 1)))
    assert all(leaf.is_deleted() for leaf in cache.leaves.values())
    loaded = make(mover, copied, loads=pairs((0, 1)))
    assert copied.kv.is_deleted() and not loaded.kv.is_deleted()


def test_a_save_is_what_the_block_held_then_though_the_pool_is_written_before_it_is_taken_in(mover):
    fill_host(mover)
    while mover._num_timed < NUM_TIMED:  # those that are waited for are taken in at once
        make(mover, pool(), saves=pairs((0, 0)))
    cache, saved, move_s = mover.start(pool(), Moves(pairs((3, 9)), pairs(), pairs()))
    assert len(saved) == 1 and move_s == 0
    assert saved[0][1].kv.sharding.memory_kind == ("pinned_host" if mover._staged else "device")
    cache = make(mover, cache, copies=pairs((5, 3)))
    mover.finish(saved)
    assert numbers(mover.host_blocks)[9] == 3 and numbers(cache)[3] == 5


def test_warm_up_compiles_all_that_moves_can_need_with_a_host_and_without():
    mover = BlockMover(LAYOUT, NUM_BLOCKS, NUM_SLOTS)
    mover.warm_up()
    compiled = mover.num_compilations
    assert compiled == 3 * len(SIZES)
    blocks = np.arange(140, dtype=np.int32)
    for count in (1, 5, 64, 140):
        same = np.stack([blocks, blocks], 1)[:count]
        make(mover, pool(), same, same, pairs())
        make(mover, pool(), pairs(), pairs(), same)
    assert mover.num_compilations == compiled
    alone = BlockMover(LAYOUT, NUM_BLOCKS, 0)
    alone.warm_up()
    # More than 64 copies are gathered and scattered.
    for count in (1, 140):
        make(alone, pool(), copies=np.stack([blocks, blocks[::-1]], 1)[:count])
    assert alone.num_compilations == compiled


def test_the_first_moves_are_timed_once_they_are_compiled():
    mover = BlockMover(LAYOUT, NUM_BLOCKS, NUM_SLOTS)
    move = Moves(pairs((0, 0)), pairs(), pairs())
    seconds = []
    for _ in range(NUM_TIMED + 3):
        _, saved, move_s = mover.start(pool(), move)
        mover.finish(saved)
        seconds.append(move_s)
    assert [s > 0 for s in seconds] == [False] + [True] * NUM_TIMED + [False] * 2


def test_a_memory_that_the_device_does_not_have_is_refused():
    with pytest.raises(ValueError, match="drum"):
        BlockMover(LAYOUT, NUM_BLOCKS, NUM_SLOTS, staging="drum")
    assert BlockMover(LAYOUT, NUM_BLOCKS, NUM_SLOTS)._staged is None and jax.default_backend() == "cpu"
