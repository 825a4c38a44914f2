"""`ksana trace`: its targets, and one clear error line for other commands."""

import json
from pathlib import Path

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.trace.command import command_line


def test_a_bench_is_traced_with_its_own_options(tmp_path, run_ksana):
    options = ["--rows", "2", "--steps", 3, "--context", 64, "--json", "--out", tmp_path / "out"]
    code, shown, _ = run_ksana("trace", "bench", "experiments.benches.host:Host", *options)
    assert code == 0 and any(line.startswith("{") for line in shown.splitlines()) and "index.html" in shown
    trace = json.loads((tmp_path / "out/trace.json").read_text())
    assert trace["command"] == "ksana bench experiments.benches.host:Host --rows 2 --steps 3 --context 64 --json"
    assert trace["engines"][0]["num_steps"] > 3 and trace["functions"] == []


def test_an_experiment_is_run_into_the_folder():
    out = Path("here")
    words = ["quickstart", "engine.block_size=8"]
    assert command_line(words, ["run", "bench"], out) == ["run", *words, "--out", "here/run"]
    assert command_line([*words, "--shard", "1/2"], ["run"], out) == [
        "run",
        *words,
        "--shard",
        "1/2",
        "--out",
        "here/run",
    ]
    assert command_line(["bench", "throughput", "--requests", "8"], ["bench"], out)[:2] == ["bench", "throughput"]
    with pytest.raises(ConfigError, match=r"unknown key 'engin.block_size'|unknown key 'engin'"):
        command_line(["quickstart", "engin.block_size=8"], [], out)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["run", "nowhere"], "nowhere: no such experiment file"),
        (["doctor"], "ksana doctor builds no engine: trace an experiment or one of bench"),
        (["quickstart", "--profile-steps", "-1"], "--profile-steps is -1, must be"),
    ],
)
def test_what_cannot_be_traced_is_one_line_and_leaves_no_folder(words, error, tmp_path, run_ksana):
    code, _, shown = run_ksana("trace", *words, "--out", tmp_path / "out")
    assert code == 2 and error in shown and shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_refused(tmp_path, run_ksana):
    (tmp_path / "a").write_text("mine")
    code, _, shown = run_ksana("trace", "quickstart", "--out", tmp_path)
    assert code == 2 and "is not empty: a trace is written to a folder of its own" in shown
