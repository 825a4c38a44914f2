"""Blocks taken, shared and given back, held against a plain dictionary of owners."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana_jax.kv.block_manager import BlockManager, NoFreeBlocks


class Pool(RuleBasedStateMachine):
    """Owners that take, share and release blocks at random."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.blocks = BlockManager(num_blocks, 4)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 5))
    def take(self, count):
        taken = {block for blocks in self.owned for block in blocks}
        if count > self.blocks.num_blocks - len(taken):
            with pytest.raises(NoFreeBlocks):
                self.blocks.allocate(count)
            return
        ids = self.blocks.allocate(count).tolist()
        assert len(set(ids)) == count and not taken & set(ids)
        assert all(0 <= block < self.blocks.num_blocks for block in ids)
        self.owned.append(ids)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data):
        ids = data.draw(st.sampled_from(self.owned))
        self.blocks.share(np.array(ids, np.int32))
        self.owned.append(list(ids))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), count=st.integers(1, 3))
    def release(self, data, count):
        """Up to three owners at once, which may hold the same blocks."""
        ids: list[int] = []
        for _ in range(min(count, len(self.owned))):
            ids += self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.blocks.release(np.array(ids, np.int32))

    @invariant()
    def books_balance(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check(np.array(ids, np.int32) for ids in self.owned)
        taken = {block for blocks in self.owned for block in blocks}
        assert self.blocks.num_used == len(taken)
        assert self.blocks.num_free + self.blocks.num_used == self.blocks.num_blocks


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=25)


def test_asking_for_more_than_is_free_takes_nothing_and_says_the_numbers():
    blocks = BlockManager(4, 16)
    blocks.allocate(3)
    with pytest.raises(NoFreeBlocks, match="2 blocks requested, 1 of 4 free"):
        blocks.allocate(2)
    assert blocks.num_free == 1


def test_taking_no_block_is_fine():
    blocks = BlockManager(1, 16)
    blocks.allocate(1)
    assert blocks.allocate(0).tolist() == []
    blocks.release(np.zeros(0, np.int32))
    assert blocks.num_used == 1


def test_low_ids_go_first_again_after_release():
    blocks = BlockManager(8, 16)
    ids = blocks.allocate(5)
    blocks.release(ids[1:4])
    assert sorted(blocks.allocate(3)) == sorted(ids[1:4])


def test_a_shared_block_is_free_once_its_last_owner_lets_go():
    blocks = BlockManager(2, 16)
    ids = blocks.allocate(1)
    blocks.share(np.repeat(ids, 2))
    blocks.release(np.repeat(ids, 2))
    assert blocks.num_free == 1
    blocks.release(ids)
    assert blocks.num_free == 2


def test_a_block_released_too_often_is_noticed():
    blocks = BlockManager(2, 16)
    ids = blocks.allocate(1)
    with pytest.raises(AssertionError, match="more often than it was taken"):
        blocks.release(np.repeat(ids, 2))


def test_a_free_block_cannot_be_shared():
    with pytest.raises(AssertionError, match="cannot be shared"):
        BlockManager(2, 16).share(np.array([0]))


def harm_nothing(blocks, ids):
    return [ids]


def harm_lost_owner(blocks, ids):
    return [ids[:-1]]


def harm_unknown_owner(blocks, ids):
    return [ids, ids[:1]]


def harm_free_and_held(blocks, ids):
    blocks._free[blocks.num_free - 1] = ids[0]
    return [ids]


def harm_free_twice(blocks, ids):
    blocks._free[blocks.num_free - 1] = blocks._free[0]
    return [ids]


def harm_in_no_list(blocks, ids):
    blocks.num_free -= 1
    return [ids]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (harm_nothing, None),
        (harm_lost_owner, r"\[1\] owners counted, \[0\] found"),
        (harm_unknown_owner, r"\[1\] owners counted, \[2\] found"),
        (harm_free_and_held, r"blocks \[0 3\] are \[2 0\] times among"),
        (harm_free_twice, r"are \[0 2\] times among"),
        (harm_in_no_list, r"are \[0\] times among"),
    ],
)
def test_check_sees_books_that_are_wrong(harm, words):
    blocks = BlockManager(6, 16)
    ids = blocks.allocate(3)
    owned = harm(blocks, ids)
    if words is None:
        blocks.check(owned)
        return
    with pytest.raises(AssertionError, match=words):
        blocks.check(owned)
