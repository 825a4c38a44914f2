"""Reads from a disk whose answers are late, never come, or are no."""

import numpy as np
import pytest

from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.kv.disk.tier import BlockFacts
from ksana_jax.kv.layout import KVGroup, KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import check_memory
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.tier import DEVICE, HOST
from ksana_jax.kv.visible_range import VisibleRange
from tests.fakes import prompt_of
from tests.kv.disk.double import DiskDouble
from tests.kv.prefixes import claim, pin, sequence

SIZE = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """Memory with a disk on which some texts lie; a block's data are its first token."""

    def __init__(self, *texts, slots: int = 8, patterns=(FULL,), num_blocks: int = 16):
        self.clock, self.disk = Clock(), DiskDouble()
        self.memory = KVMemory(
            num_blocks,
            PrefixIndex(SIZE),
            caching=True,
            host_data=np.zeros((slots, 1), np.int32),
            disk=self.disk,
            clock=self.clock,
            read_timeout_s=10.0,
        )
        layout = KVLayout((KVGroup(tuple(range(len(patterns))), VisibleRange.of(patterns)),), SIZE)
        self.memory.set_layout(layout, Scope("m", repr(patterns), min(p.full_until for p in patterns)))
        self.reads, self.prefixes = self.memory.disk_reads, self.memory.prefixes
        self.host = self.memory.host and self.memory.host.pool
        for text in texts:
            self.write(text)

    def write(self, text) -> None:
        """Puts the full blocks of a text on the disk."""
        index = self.memory.index
        parent = index.root("").key
        for depth, link in enumerate(index.chain(text, "", [], len(text) // SIZE)):
            facts = BlockFacts(link.key, parent, link.tokens, depth * SIZE)
            self.disk.write(facts, np.frombuffer(link.tokens, np.int32)[:1])
            parent = link.key

    def cache(self, text) -> list[int]:
        """Has the full blocks of a text computed and let go, on the device."""
        seq = sequence(text)
        ids = self.memory.device.allocate(len(text) // SIZE)
        self.prefixes.insert(seq.kv, seq.token_ids, [ids.tolist()])
        self.memory.device.release(ids)
        return ids.tolist()

    def evict_to_host(self, count: int) -> None:
        """Takes device blocks so that `count` cached ones must leave, and gives them back."""
        ids = self.memory.device.allocate(self.memory.blocks.num_free + count)
        self.memory.take_moves()
        self.memory.commit()
        self.memory.device.release(ids)

    def check(self) -> None:
        check_memory(self.memory, [])

    def on_host(self, seq) -> list[int]:
        """First tokens of a sequence's blocks, as they lie on the host; -1 where they do not."""
        found = []
        for link in seq.kv.links[0]:
            node = self.memory.index.nodes.get(link.key)
            found.append(-1 if node is None or node.at[HOST] < 0 else int(self.memory.host.data[node.at[HOST], 0]))
        return found


def test_a_sequence_awaits_its_reads_and_then_finds_them():
    text = prompt_of(17)
    setup = Setup(text)
    seq = sequence(text)
    assert pin(setup.prefixes, seq).awaits and setup.reads.num_pending == 4 and setup.host.num_used == 4
    assert not setup.reads.ready(seq.kv)
    setup.check()
    for asked in setup.disk.asked[:3]:
        setup.disk.end(asked)
    assert not setup.reads.ready(seq.kv)
    setup.disk.end_all()
    assert setup.reads.ready(seq.kv) and setup.reads.num_pending == 0
    assert setup.on_host(seq) == text[:16:4].tolist()
    hit = pin(setup.prefixes, seq)
    assert (hit.num_tokens, hit.num_loads, hit.awaits) == (16, 4, False)
    held = claim(setup.prefixes, seq, hit)
    setup.reads.end(seq.kv)
    assert len(held.ids) == 4 and setup.memory.counters.hits_disk == 4
    setup.memory.take_moves()
    setup.memory.commit()
    assert setup.host.num_used == 0 and setup.host.num_idle == 4
    setup.memory.device.release(held.ids)
    setup.check()


def test_slots_are_reserved_for_all_reads_or_for_none():
    texts = prompt_of(17), prompt_of(17, seed=1)
    setup = Setup(*texts, slots=7)
    first, second = map(sequence, texts)
    assert pin(setup.prefixes, first).awaits
    hit = pin(setup.prefixes, second)
    assert not hit.awaits and hit.num_tokens == 0
    assert setup.host.num_used == 4 and len(setup.disk.asked) == 4
    setup.check()
    setup.disk.end_all()
    assert setup.reads.ready(first.kv) and setup.reads.ready(second.kv)
    # What was read is pinned until its sequence runs: the other one still cannot have it all.
    assert setup.memory.host.pool.num_available == 3
    setup.reads.end(first.kv)
    assert setup.memory.host.pool.num_available == 7
    setup.check()


def test_who_asks_again_while_reads_are_pending_waits_for_those():
    text = prompt_of(17)
    setup = Setup(text)
    first, second, longer = sequence(text), sequence(text), sequence(np.append(text, 5))
    for seq in (first, second, longer):
        assert pin(setup.prefixes, seq).awaits
    assert len(setup.disk.asked) == 4 and setup.host.num_used == 4
    setup.disk.end_all()
    assert setup.reads.ready(first.kv)
    for seq in (second, longer):
        assert pin(setup.prefixes, seq).num_tokens == 16
    assert len(setup.disk.asked) == 4


def test_who_waits_for_the_reads_of_another_does_so_no_longer_than_that_one():
    text = prompt_of(17)
    setup = Setup(text)
    first, second = sequence(text), sequence(text)
    assert pin(setup.prefixes, first).awaits and pin(setup.prefixes, second).awaits
    setup.clock.now = 10.5
    assert not pin(setup.prefixes, second).awaits
    assert setup.reads.ready(first.kv) and not pin(setup.prefixes, first).awaits


@pytest.mark.parametrize("found", [True, False])
def test_a_late_read_keeps_its_slot_until_it_ends_and_gives_nothing(found):
    text = prompt_of(17)
    setup = Setup(text)
    seq = sequence(text)
    pin(setup.prefixes, seq)
    setup.disk.end(setup.disk.asked[0])
    setup.clock.now = 9.9
    assert not setup.reads.ready(seq.kv)
    setup.clock.now = 10.0
    assert setup.reads.ready(seq.kv) and setup.reads.num_pending == 0
    assert setup.on_host(seq) == [text[0], -1, -1, -1]
    setup.check()
    # Three are still written to; nobody else gets them.
    setup.reads.end(seq.kv)
    assert setup.host.num_used == 3
    late = {asked.out.ctypes.data for asked in setup.disk.asked[1:]}
    free = [setup.memory.host.take_slot() for _ in range(5)]
    assert setup.memory.host.take_slot() is None
    assert not late & {setup.memory.host.data[slot].ctypes.data for slot in free}
    setup.reads.poll()
    assert setup.host.num_used == 8
    setup.disk.end_all(found)
    setup.reads.poll()
    setup.reads.poll()
    assert setup.host.num_used == 5
    setup.memory.swap.discard(np.array(free, np.int32))
    setup.check()


def test_a_sequence_that_leaves_gives_back_what_is_read_and_later_what_is_not():
    text = prompt_of(17)
    setup = Setup(text)
    seq = sequence(text)
    pin(setup.prefixes, seq)
    setup.disk.end(setup.disk.asked[0])
    setup.reads.end(seq.kv)
    setup.reads.end(seq.kv)
    assert setup.host.num_used == 4 and len(setup.memory.index) == 0 and setup.reads.num_pending == 0
    setup.check()
    setup.reads.poll()
    assert setup.host.num_used == 3
    setup.disk.end_all()
    setup.reads.poll()
    assert setup.host.num_free == 8
    setup.check()


@pytest.mark.parametrize("failing", range(4))
def test_a_read_that_fails_is_a_miss_and_frees_its_slot(failing):
    text = prompt_of(17)
    setup = Setup(text)
    seq = sequence(text)
    pin(setup.prefixes, seq)
    for place, asked in enumerate(setup.disk.asked):
        setup.disk.end(asked, found=place != failing)
    assert setup.reads.ready(seq.kv)
    hit = pin(setup.prefixes, seq)  # and does not ask again
    assert hit.num_tokens == SIZE * failing and not hit.awaits and len(setup.disk.asked) == 4
    setup.prefixes.unpin(hit)
    setup.reads.end(seq.kv)
    assert setup.host.num_used == 0 and setup.host.num_idle == 3
    setup.check()


def test_what_is_there_is_not_read_and_does_not_make_room_for_the_rest():
    text = prompt_of(17)
    setup = Setup(text, slots=4, num_blocks=4)
    setup.cache(text[:8])
    setup.evict_to_host(2)
    assert setup.host.num_idle == 2
    seq = sequence(text)
    assert pin(setup.prefixes, seq).awaits
    assert [asked.key for asked in setup.disk.asked] == [link.key for link in seq.kv.links[0][2:4]]
    setup.disk.end_all()
    assert setup.reads.ready(seq.kv)
    assert pin(setup.prefixes, seq).num_tokens == 16


def test_reads_find_no_room_where_what_is_there_must_stay():
    text = prompt_of(17)
    setup = Setup(text, slots=3, num_blocks=4)
    setup.cache(text[:8])
    setup.evict_to_host(2)
    hit = pin(setup.prefixes, sequence(text))
    assert not hit.awaits and hit.num_tokens == 8 and not setup.disk.asked
    setup.prefixes.unpin(hit)
    setup.check()


def test_under_a_window_only_what_later_queries_see_is_read():
    patterns = (AttentionPattern(window=5, num_sinks=1),)
    text = prompt_of(30)
    setup = Setup(text, patterns=patterns)
    seq = sequence(text)
    assert pin(setup.prefixes, seq).awaits
    # Query 28 sees 24 and later, and the sink.
    assert [asked.key for asked in setup.disk.asked] == [seq.kv.links[0][b].key for b in (0, 6)]
    setup.disk.end_all()
    assert setup.reads.ready(seq.kv)
    hit = pin(setup.prefixes, seq)
    assert hit.num_tokens == 28 and hit.starts == [0, 24]


def test_a_disk_that_is_off_or_no_host_reads_nothing():
    text = prompt_of(17)
    setup = Setup(text)
    setup.disk.enabled = False
    assert not pin(setup.prefixes, sequence(text)).awaits
    setup = Setup(text, slots=0)
    assert not pin(setup.prefixes, sequence(text)).awaits
    assert not setup.disk.asked


def test_what_was_computed_meanwhile_is_kept_beside_what_was_read():
    text = prompt_of(17)
    setup = Setup(text)
    reader = sequence(text)
    pin(setup.prefixes, reader)
    ids = setup.cache(text[:16])
    setup.disk.end_all()
    assert setup.reads.ready(reader.kv)
    setup.reads.end(reader.kv)
    setup.check()
    hit = pin(setup.prefixes, reader)
    assert hit.num_loads == 0 and [node.at[DEVICE] for node in hit.nodes] == ids


def test_two_reads_of_one_block_give_one_of_their_slots_back():
    text = prompt_of(5)
    setup = Setup(text)
    first, second = sequence(text), sequence(text)
    pin(setup.prefixes, first)
    setup.reads.end(first.kv)  # its read goes on
    pin(setup.prefixes, second)
    assert len(setup.disk.asked) == 2 and setup.host.num_used == 2
    assert setup.disk.asked[0].out.ctypes.data != setup.disk.asked[1].out.ctypes.data
    setup.disk.end_all()
    setup.reads.poll()
    assert setup.reads.ready(second.kv)
    assert setup.host.num_used == 1
    setup.check()


def test_waiting_ends_with_the_first_read():
    text = prompt_of(17)
    setup = Setup(text)
    setup.reads.wait(60.0)  # for nothing
    pin(setup.prefixes, sequence(text))
    setup.disk.end(setup.disk.asked[2])
    setup.reads.wait(60.0)


def test_room_for_a_read_may_be_made_of_a_block_that_continues_the_one_to_be_read():
    """Under a window a parent may be evicted before its child; to read it back, the child may have to go."""
    patterns = (AttentionPattern(window=5),)
    text = prompt_of(9)
    setup = Setup(patterns=patterns, slots=1, num_blocks=2)
    setup.cache(text)
    user = sequence(text)
    held = claim(setup.prefixes, user)
    assert len(held.ids) == 1  # the window begins in the second block, which is now of later use than the first
    setup.memory.device.release(held.ids)
    setup.evict_to_host(1)
    setup.evict_to_host(1)  # the first block is on the host, and goes to the disk for the second's sake
    assert list(setup.disk.files) == [user.kv.links[0][0].key] and setup.host.num_idle == 1
    seq = sequence(text[:5])
    assert pin(setup.prefixes, seq).awaits
    setup.check()
    setup.disk.end_all()
    assert setup.reads.ready(seq.kv)
    setup.check()
    assert pin(setup.prefixes, seq).num_tokens == 4


def test_reads_whose_keys_are_taken_by_other_content_are_not_waited_for():
    # Both on the disk, the first block is found by its key and is another's: nothing can be read after it.
    setup = Setup(prompt_of(9))
    seq = sequence(prompt_of(9))
    link = setup.memory.index.chain(seq.token_ids, "", seq.kv.links[0], 1)[0]
    [other] = setup.memory.device.allocate(1).tolist()
    node = setup.memory.index.child(setup.memory.index.root(""), b"x" * 4 * SIZE, link.key)
    setup.memory.device.put(node, other)
    hit = pin(setup.prefixes, seq)
    assert not hit.awaits and not hit.num_tokens and not setup.disk.asked and not setup.reads.num_pending
    setup.memory.device.release(np.array([other], np.int32))
    setup.check()
    assert not setup.host.num_used
