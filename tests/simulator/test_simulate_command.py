"""`ksana simulate`: fit, and its errors."""

import json

import pytest
from typer.testing import CliRunner

from ksana_jax.cli import app
from ksana_jax.simulator.step_file import write_steps
from tests.simulator.test_costs import recorded


def test_a_fit_writes_costs_and_prints_errors_of_held_out_steps(tmp_path):
    write_steps(tmp_path / "steps.jsonl", {"model": "toy"}, recorded())
    cost = tmp_path / "cost.json"
    done = CliRunner().invoke(app, ["simulate", "fit", str(tmp_path / "steps.jsonl"), "-o", str(cost)])
    assert done.exit_code == 0, done.output
    assert "decode: " in done.output and "steps held out" in done.output and "moves: not measured" in done.output
    written = json.loads(cost.read_text())
    assert written["level"] == "fitted" and written["provenance"]["steps"]["model"] == "toy"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["fit", __file__], "has no steps"),
        (["fit", __file__, "--method", "forest"], "--method is 'forest', must be one of affine, table"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_done_is_an_error_in_one_line(arguments, words):
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert done.exit_code != 0 and words in f"{done.output}{done.exception}"


@pytest.mark.soak
def test_a_simulated_engine_decides_as_the_real_one():
    from ksana_jax.simulator.validate import check_decisions

    said = []
    assert check_decisions("ksana-tiny", said.append), "\n".join(said)
    assert len(said) == 10
