"""`ksana simulate`: fit, and its errors."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ksana_jax.cli import app
from ksana_jax.lab import recording
from tests.lab.simulator.test_costs import recorded


def test_a_fit_writes_costs_and_prints_errors_of_held_out_steps(tmp_path):
    recording.write(tmp_path / "steps.jsonl", {"model": "toy"}, map(recording.plain_record, recorded()))
    cost = tmp_path / "cost.json"
    done = CliRunner().invoke(app, ["simulate", "fit", str(tmp_path / "steps.jsonl"), "-o", str(cost)])
    assert done.exit_code == 0, done.output
    assert "decode: " in done.output and "steps held out" in done.output and "moves: not measured" in done.output
    written = json.loads(cost.read_text())
    assert written["level"] == "fitted" and written["provenance"]["steps"]["model"] == "toy"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "nowhere.jsonl"], "nowhere.jsonl: no such file or folder"),
        (["fit", __file__], "is not a recording"),
        (["fit", __file__, "--method", "forest"], "--method is 'forest', must be one of affine, table"),
        (["capacity", "nowhere.yaml", "--slo", "ttft=1"], "nowhere.yaml: no such experiment file"),
        (["capacity", "capacity", "--slo", "ttft_p99"], "slo has 'ttft_p99', must be NAME=SECONDS"),
        (["capacity", "capacity", "--slo", "tftt=2"], "unknown metric 'tftt'; the nearest is 'ttft'"),
    ],
)
def test_what_cannot_be_done_is_an_error_in_one_line(arguments, words):
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert done.exit_code != 0 and words in f"{done.output}{done.exception}"


def capacity(tmp_path, slo, *overrides):
    """Runs the example of docs/use/simulator.md; returns its exit code and what it printed, in one line."""
    page = (Path(__file__).parents[3] / "docs/use/simulator.md").read_text()
    found = re.search(
        r"```yaml\n(task: capacity.*?)```\n\n```\n\$ ksana simulate capacity.*?\n(.*?)```", page, re.DOTALL
    )
    assert found
    (tmp_path / "server.yaml").write_text(found[1])
    given = [str(tmp_path / "server.yaml"), *overrides, "--slo", slo, "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["simulate", "capacity", *given])
    return done.exit_code, " ".join(f"{done.output}{done.exception or ''}".split()), " ".join(found[2].split())


def test_the_pages_example_of_a_capacity_prints_what_the_page_says(tmp_path):
    code, said, expected = capacity(tmp_path, "ttft_p99=2,tpot_p99=0.1")
    assert code == 0 and expected in said


def test_objectives_that_no_rate_keeps_are_named_with_the_lowest_rate(tmp_path):
    code, said, _ = capacity(tmp_path, "ttft_p99=0.0001", "settings.workload.num_requests=20", "settings.ratio=2")
    assert code == 0
    assert re.search(r"No rate keeps the objectives: .*at 0\.000244 requests/s, ttft_p99 is 0\.\d+ s", said)


def test_objectives_that_every_rate_keeps_are_an_error_with_the_highest_rate(tmp_path):
    code, said, _ = capacity(tmp_path, "ttft_p99=1000", "settings.workload.num_requests=2", "settings.ratio=2")
    assert code == 1 and "every rate up to 4,096 requests/s keeps ttft_p99 <= 1000 s: 1 requests are judged" in said
