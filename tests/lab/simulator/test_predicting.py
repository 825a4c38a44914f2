"""Figures of measured rounds: their medians, and by how much a measurement differs from itself."""

import numpy as np
import pytest

from ksana_jax.lab.simulator.predicting import LIMITS, against_itself, typical


def rounds(*values):
    return [dict.fromkeys(LIMITS, value) for value in values]


def test_a_round_in_which_the_machine_stood_still_decides_nothing():
    assert typical(rounds(1.0, 1.1, 50.0, 0.9, 1.0)) == dict.fromkeys(LIMITS, 1.0)


def test_equal_rounds_do_not_differ_from_themselves():
    assert against_itself(rounds(*[2.0] * 7)) == dict.fromkeys(LIMITS, 0.0)


def test_halves_of_rounds_that_differ_tell_by_how_much():
    # Two rounds have two halves: 1 against 2, or 2 against 1.
    assert against_itself(rounds(1.0, 2.0))["E2E p50"] == pytest.approx(0.75, abs=0.26)
    few, many = (against_itself(rounds(*np.linspace(0.9, 1.1, n)))["TPOT p50"] for n in (4, 60))
    assert 0 < many < few < 0.23


def test_halves_are_drawn_alike_each_time():
    values = rounds(*(1 + 0.01 * n for n in range(9)))
    assert against_itself(values) == against_itself(values)
