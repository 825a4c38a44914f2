"""Blocks between device, host and disk: the moves of a decision, and the owner of a slot meanwhile."""

import numpy as np
import pytest

from ksana_jax.kv import flushing
from ksana_jax.kv.block_manager import NoFreeBlocks
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import check_memory
from ksana_jax.kv.prefix_index import PrefixIndex
from tests.fakes import prompt_of
from tests.kv.disk.double import DiskDouble
from tests.kv.prefixes import cache, claim, pin, sequence

SIZE = 4


def memory_of(num_blocks: int = 6, slots: int = 4, **settings) -> KVMemory:
    settings = {"caching": True, "host_data": np.zeros((slots, 1), np.int32)} | settings
    return KVMemory(num_blocks, PrefixIndex(SIZE), **settings)


def moves(memory: KVMemory) -> dict[str, list]:
    """The moves that are due, made."""
    taken = memory.take_moves()
    memory.commit()
    if taken is None:
        return {}
    return {n: getattr(taken, n).tolist() for n in ("saves", "copies", "loads") if len(getattr(taken, n))}


def ids_of(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_cached_blocks_make_room_only_once_no_block_is_free():
    memory = memory_of()
    cache(memory, prompt_of(8))
    assert memory.device.pool.num_available == 6 and memory.blocks.num_idle == 2
    memory.device.allocate(4)
    assert memory.counters.replaced == 0 and memory.blocks.num_idle == 2
    memory.device.allocate(1)
    assert memory.counters.replaced == 1 and memory.device.pool.num_available == 1
    with pytest.raises(NoFreeBlocks, match="2 blocks requested, 1 of 6 available"):
        memory.device.allocate(2)
    assert memory.device.pool.num_available == 1


def test_an_evicted_block_is_saved_before_whoever_took_it_writes_to_it():
    memory = memory_of(num_blocks=2)
    ids = cache(memory, prompt_of(8))
    taken = memory.device.allocate(2)
    assert sorted(taken.tolist()) == sorted(ids)
    assert moves(memory) == {"saves": [[ids[1], 0], [ids[0], 1]]}
    check_memory(memory, [taken])
    # Found on the host now, and loaded.
    memory.device.release(taken)
    seq = sequence(prompt_of(8)[:8].tolist() + [1])
    hit = pin(memory.prefixes, seq)
    assert hit.num_loads == 2
    held = claim(memory.prefixes, seq, hit)
    assert moves(memory) == {"loads": [[1, held.ids[0]], [0, held.ids[1]]]}
    check_memory(memory, [held.ids])
    assert (memory.counters.saved, memory.counters.loaded, memory.counters.hits_host) == (2, 2, 2)


def test_a_slot_that_a_pending_move_touches_is_not_reused():
    memory = memory_of(num_blocks=2, slots=1)
    cache(memory, prompt_of(8))
    taken = memory.device.allocate(2)  # of two evicted blocks only one finds a slot
    assert memory.host.take_slot() is None and memory.counters.saved == 1
    assert len(moves(memory)["saves"]) == 1
    assert memory.host.take_slot() == 0 and memory.counters.replaced_host == 1
    memory.swap.discard(ids_of(0))
    check_memory(memory, [taken])


def test_a_block_that_is_on_the_host_already_is_not_saved_again():
    memory = memory_of(num_blocks=1)
    cache(memory, prompt_of(4))
    for turn in range(3):
        memory.device.release(memory.device.allocate(1))
        assert bool(moves(memory)) == (turn == 0)
        seq = sequence(prompt_of(4).tolist() + [1])
        held = claim(memory.prefixes, seq)
        assert moves(memory) == {"loads": [[0, 0]]}
        memory.device.release(held.ids)
    assert memory.counters.saved == 1


@pytest.mark.parametrize("write", ["back", "through", "drop"])
def test_cached_content_moves_to_slower_tiers_when_it_is_told_to(write):
    disk = DiskDouble()
    memory = memory_of(num_blocks=2, slots=2, write=write, disk=disk)
    cache(memory, prompt_of(8))
    moves(memory)
    saved, written = memory.counters.saved, len(disk.files)
    memory.device.release(memory.device.allocate(2))
    moves(memory)
    evicted_saved, evicted_written = memory.counters.saved, len(disk.files)
    slots = [memory.host.take_slot(), memory.host.take_slot()]
    assert {0, 1} == set(slots)
    counts = (saved, written, evicted_saved, evicted_written, len(disk.files))
    assert counts == {"back": (0, 0, 2, 0, 2), "through": (2, 2, 2, 2, 2), "drop": (0, 0, 0, 0, 0)}[write]
    memory.swap.discard(np.array(slots, np.int32))
    check_memory(memory, [])
    assert len(memory.index) == 0


def test_what_is_still_on_the_device_is_not_written_to_disk_when_it_leaves_the_host():
    disk = DiskDouble()
    memory = memory_of(num_blocks=2, slots=1, disk=disk)
    cache(memory, prompt_of(4))
    memory.device.release(memory.device.allocate(2))
    moves(memory)
    seq = sequence(prompt_of(4).tolist() + [1])
    held = claim(memory.prefixes, seq)
    moves(memory)
    assert memory.host.take_slot() == 0 and not disk.files
    memory.swap.discard(ids_of(0))
    check_memory(memory, [held.ids])


# ------------------------------------------------------------------ copies


def test_a_shared_block_is_copied_for_one_owner_and_left_to_the_others():
    memory = memory_of()
    [block] = memory.device.allocate(1).tolist()
    assert not memory.device.is_shared(block)
    memory.blocks.share(ids_of(block))
    assert memory.device.is_shared(block)
    new = memory.device.copy(block)
    assert new != block and memory.blocks.ref_count[[block, new]].tolist() == [1, 1]
    assert moves(memory) == {"copies": [[block, new]]} and memory.counters.copied == 1
    assert not memory.device.is_shared(block)


def test_a_cached_block_is_shared_though_it_has_one_owner():
    memory = memory_of()
    seq, ids = sequence(prompt_of(4)), memory.device.allocate(1)
    memory.prefixes.insert(seq.kv, seq.token_ids, [ids.tolist()])
    assert memory.device.is_shared(int(ids[0]))


def test_a_copy_of_a_copy_that_is_not_made_yet_is_read_from_the_first_block():
    memory = memory_of()
    [block] = memory.device.allocate(1).tolist()
    memory.blocks.share(ids_of(block, block))
    one = memory.device.copy(block)
    memory.blocks.share(ids_of(one))
    other = memory.device.copy(one)
    assert moves(memory) == {"copies": [[block, one], [block, other]]}


def test_a_copy_whose_owner_has_gone_is_not_made():
    memory = memory_of()
    [block] = memory.device.allocate(1).tolist()
    memory.blocks.share(ids_of(block))
    memory.device.release(ids_of(memory.device.copy(block)))
    assert moves(memory) == {}


def test_a_block_that_was_to_be_copied_is_swapped_out_from_where_its_content_is():
    memory = memory_of()
    [block] = memory.device.allocate(1).tolist()
    memory.blocks.share(ids_of(block))
    new = memory.device.copy(block)
    slots = memory.swap.move_out(ids_of(new))
    memory.device.release(ids_of(new))
    assert moves(memory) == {"saves": [[block, slots[0]]]}


# ------------------------------------------------------------------ swapped rows


def test_a_row_that_is_swapped_out_and_in_owns_its_slots_in_between():
    memory = memory_of()
    ids = memory.device.allocate(3)
    slots = memory.swap.move_out(ids)
    memory.device.release(ids)
    assert moves(memory) == {"saves": [[b, s] for b, s in zip(ids.tolist(), slots.tolist(), strict=True)]}
    check_memory(memory, [], [slots])
    back = memory.swap.move_in(slots)
    check_memory(memory, [back])  # the slots are pinned until they have been read
    assert memory.host.pool.num_used == 3
    assert moves(memory) == {"loads": [[s, b] for s, b in zip(slots.tolist(), back.tolist(), strict=True)]}
    assert memory.host.pool.num_used == 0
    assert (memory.counters.swapped_out, memory.counters.swapped_in) == (3, 3)


def test_a_swapped_row_that_is_given_up_is_not_saved():
    memory = memory_of()
    ids = memory.device.allocate(2)
    slots = memory.swap.move_out(ids)
    memory.device.release(ids)
    memory.swap.discard(slots)
    assert moves(memory) == {} and memory.host.pool.num_free == 4


def test_rows_are_swapped_as_told_and_only_where_all_their_blocks_find_room():
    for preempt, host in (("swap", True), ("recompute", False), ("auto", True)):  # auto learns the costs first
        memory = memory_of(preempt=preempt)
        assert memory.swap.is_better(4, 100) == host and not memory.swap.is_better(5, 100)
        assert memory_of(preempt=preempt, host_data=None).swap is None


def test_auto_weighs_moving_both_ways_against_computing():
    memory = memory_of(preempt="auto", slots=8)
    memory.costs._token_s.append(1.0)
    memory.costs._block_s.append(1.0)
    assert memory.swap.is_better(2, 5) and not memory.swap.is_better(2, 4)


def test_a_row_s_slots_take_the_place_of_cached_content():
    memory = memory_of(num_blocks=4, slots=2)
    cache(memory, prompt_of(8))
    taken = memory.device.allocate(4)
    moves(memory)
    assert memory.host.pool.num_idle == 2 and memory.swap.is_better(2, 1)
    slots = memory.swap.move_out(taken[:2])
    assert memory.counters.replaced_host == 2 and len(memory.index) == 0
    moves(memory)
    check_memory(memory, [taken], [slots])


# ------------------------------------------------------------------ flush, and failure


def flush(memory) -> int:
    """Brings all to the disk as the engine does: the rounds it took."""
    return sum(moves(memory) is not None for _ in flushing.flush(memory))


@pytest.mark.parametrize("write", ["back", "through", "drop"])
def test_a_flush_brings_all_that_is_cached_to_the_disk(write):
    disk = DiskDouble()
    memory = memory_of(num_blocks=4, slots=8, write=write, disk=disk)
    cache(memory, prompt_of(8))
    memory.device.release(memory.device.allocate(4))  # to the host
    moves(memory)
    cache(memory, prompt_of(12))
    moves(memory)
    flush(memory)
    texts = prompt_of(8), prompt_of(12)
    links = [memory.index.chain(text, "", [], len(text) // SIZE) for text in texts]
    keys = {link.key for chain in links for link in chain}
    assert set(disk.files) == (set() if write == "drop" else keys) and len(keys) == 5
    before = memory.counters.saved
    assert flush(memory) == 0 and memory.counters.saved == before
    check_memory(memory, [])


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_flush_through_a_small_host_takes_several_rounds_the_deepest_blocks_first(slots):
    disk = DiskDouble()
    memory = memory_of(num_blocks=4, slots=slots, disk=disk)
    cache(memory, prompt_of(16))
    assert flush(memory) == -(-4 // slots)
    links = memory.index.chain(prompt_of(16), "", [], 4)
    assert [link.key for link in reversed(links)] == list(disk.files)
    check_memory(memory, [])


def test_a_flush_without_a_disk_does_nothing():
    memory = memory_of()
    cache(memory, prompt_of(8))
    assert flush(memory) == 0 and moves(memory) == {}


def test_after_a_reset_device_and_host_are_empty_whatever_the_books_said():
    memory = memory_of(num_blocks=3, slots=4)
    cache(memory, prompt_of(4))
    memory.device.release(memory.device.allocate(3))
    moves(memory)  # one block is on the host
    cache(memory, prompt_of(8))
    memory.device.release(memory.device.allocate(2))  # another is to be saved
    memory.blocks.num_free += 1  # and an interrupt has left the books half written
    memory.host.node_of.clear()
    memory.reset(host := np.zeros((2, 1)))
    check_memory(memory, [])
    assert memory.blocks.num_free == 3 and memory.host.pool.num_free == 2 and not memory.index.nodes
    assert memory.take_moves() is None and memory.host.data is host


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="prefix_replacement is 'mru', must be one of lru, lfu, fifo"):
        memory_of(replacement="mru")
