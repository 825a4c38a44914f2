"""Medians of measured costs decide between moving and recomputing."""

import dataclasses

import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.kv.swap import Costs


def moves(saves: int, copies: int = 0, loads: int = 0) -> Moves:
    return Moves(*(np.zeros((n, 2), np.int32) for n in (saves, copies, loads)))


def measured(token_s: float, block_s: float) -> Costs:
    costs = Costs()
    costs.observe(10, 10 * token_s + 4 * block_s, moves(1, 1, 2), 4 * block_s)
    return costs


def test_moving_is_favoured_until_both_costs_are_known():
    costs = Costs()
    assert costs.moving_is_cheaper(1000, 1)
    costs.observe(10, 1.0, None, 0.0)
    assert costs.moving_is_cheaper(1000, 1)
    costs.observe(0, 9.0, moves(2), 8.0)
    assert not costs.moving_is_cheaper(1000, 1)


def test_the_cheaper_way_is_favoured():
    costs = measured(token_s=0.25, block_s=0.5)
    assert costs.moving_is_cheaper(num_blocks=1, num_tokens=3) and not costs.moving_is_cheaper(1, 2)
    assert costs.moving_is_cheaper(10, 21) and not costs.moving_is_cheaper(10, 20)


def test_seconds_of_moves_are_not_counted_as_those_of_tokens():
    costs = measured(token_s=0.25, block_s=8.0)
    costs.observe(10, 2.5, None, 0.0)
    assert not costs.moving_is_cheaper(1, 32) and costs.moving_is_cheaper(1, 33)


def test_a_decode_step_and_moves_that_were_not_waited_for_say_nothing():
    costs = measured(token_s=1.0, block_s=1.0)
    for _ in range(20):
        costs.observe(0, 1e9, None, 0.0)
        costs.observe(10, 1e9, moves(3), 0.0)
    assert costs.moving_is_cheaper(1, 2) and not costs.moving_is_cheaper(1, 1)


def test_a_step_that_compiled_does_not_change_the_median():
    costs = measured(token_s=1.0, block_s=1.0)
    for _ in range(4):
        costs.observe(10, 14.0, moves(4), 4.0)
    costs.observe(10, 1000.0, None, 0.0)
    costs.observe(0, 500.0, moves(1), 500.0)
    assert costs.moving_is_cheaper(99, 100) and not costs.moving_is_cheaper(100, 100)


def test_old_measurements_are_forgotten():
    costs = measured(token_s=1.0, block_s=1.0)
    for _ in range(20):
        costs.observe(10, 10.0, None, 0.0)
    for _ in range(33):
        costs.observe(10, 20.0, None, 0.0)  # a token takes two seconds from here on
    assert costs.moving_is_cheaper(3, 2)


def test_evictions_say_nothing_of_blocks():
    costs = Costs()
    evictions = dataclasses.replace(moves(0), evictions=[object()])
    costs.observe(10, 10.0, evictions, 5.0)
    costs.observe(10, 10.0, dataclasses.replace(moves(3), evictions=[object()]), 5.0)
    assert costs.moving_is_cheaper(1000, 1), "no block was measured alone"
