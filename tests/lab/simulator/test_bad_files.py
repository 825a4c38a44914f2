"""Files of costs with invalid content: an error names the place and the value."""

import pytest

from experiments.simulator.paced import WallClock
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.simulator.cost import read_cost

TIMES = {"shape": [[[1, 1]], 4, 1], "count": 9, "mean_s": 0.1, "factor": 1.0, "residuals": [1.0]}
FITTED = {"level": "fitted", "phases": {"decode": {"step": 0.001}}, "shapes": [TIMES]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"level": ["fitted"]}, "cost.level is ['fitted'], must be one of affine"),
        ({"level": {}}, "cost.level is {}, must be one of affine"),
        ({"phases": 7}, "cost.phases is 7, must be a mapping of decode, chunk"),
        ({"phases": {"decode": 3}}, "cost.phases.decode is 3, must be a mapping of step, tokens"),
        ({"shapes": [TIMES | {"mean_s": "x"}]}, "cost.shapes[0].mean_s is 'x', must be a finite number from 0"),
        ({"shapes": [TIMES, TIMES | {"factor": -2}]}, "cost.shapes[1].factor is -2, must be a finite number from 0"),
        ({"shapes": [TIMES | {"count": 0}]}, "cost.shapes[0].count is 0, must be an integer from 1"),
        ({"shapes": [TIMES | {"residuals": [float("nan")]}]}, "cost.shapes[0].residuals is nan, must be a finite"),
    ],
)
def test_wrong_costs_are_named_with_their_value(fields, says):
    read_cost(FITTED)
    with pytest.raises(ConfigError) as raised:
        read_cost(FITTED | fields)
    assert str(raised.value).startswith(says)


def test_a_paced_step_of_ages_is_an_error_with_its_seconds():
    with pytest.raises(ConfigError, match=r"a step of the paced device takes 1e\+300 s, must be at most 3,600 s"):
        WallClock(lambda: 0.0).advance_to(1e300)


@pytest.mark.parametrize("given", [None, "", 5, []])
def test_costs_that_are_neither_fields_nor_a_file_are_named(given):
    with pytest.raises(ConfigError) as raised:
        read_cost(given)
    assert str(raised.value) == f"cost is {given!r}, must be a mapping with a level, or the name of a file"


BENCH = ("bench", "serving", "--model", "ksana-tiny", "--rate", "1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*BENCH, "--out", "taken"), "--out is 'taken', must be a folder, and taken is a file"),
        ((*BENCH, "--seed", "-1"), "seed is -1, must be an integer from 0"),
        (
            ("simulate", "record", "ksana-tiny", "-o", "taken/steps"),
            "--out is 'taken', must be a folder, and taken is a",
        ),
        (("simulate", "record", "ksana-tiny", "-o", "folder"), "--out is 'folder', must be a file, not a folder"),
    ],
)
def test_what_would_fail_after_the_measurement_is_told_before_it(run_ksana, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "folder").mkdir()
    code, shown, error = run_ksana(*arguments)
    assert (code, shown) == (2, "") and error.startswith(f"ksana: error: {says}")
