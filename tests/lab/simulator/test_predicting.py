"""Figures of measured rounds: their medians, and by how much a measurement differs from itself; and the command."""

import sys

import numpy as np
import pytest

from experiments.simulator.__main__ import main
from experiments.simulator.predicting import LIMITS, against_itself, typical


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


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ("{level: fast}", "cost.level is 'fast', must be one of affine, fitted"),
        ("{level: affine, step_s: -1, token_s: 0}", "step_s is -1, must be"),
        ("nowhere.json", "cost nowhere.json: "),
        ("", "cost is None, must be a mapping with a level"),
    ],
)
def test_costs_that_cannot_be_read_are_told_before_the_measurement(cost, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulator", "--paced", cost])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and words in capsys.readouterr().err
