"""Moves that wait for the next step keep the order that their contents need."""

import numpy as np

from ksana_jax.kv.counters import Counters
from ksana_jax.kv.moves import Evictions, PendingMoves


def eviction(kept):
    one = np.array([kept], np.int32)
    return Evictions(one[None], one[None], one + 1, one, one, one, one, one, one)


def test_a_save_stays_before_the_evictions_that_follow_it_and_after_those_before():
    moves = PendingMoves(Counters())
    moves.save(10, 0)
    moves.save(11, 1)
    moves.evict(eviction(4))
    moves.evict(eviction(5))
    moves.save(12, 2)
    moves.evict(eviction(6))
    moves.save(13, 3)
    assert [list(saves) for saves in moves.all_saves] == [[0, 1], [], [2], [3]]
    taken = moves.take()
    assert taken.saves.tolist() == [[10, 0], [11, 1], [12, 2], [13, 3]]
    assert taken.num_early == [2, 2, 3] and [e.num_kept.item() for e in taken.evictions] == [4, 5, 6]
    assert not any(moves.all_saves) and moves.take().num_early == []
