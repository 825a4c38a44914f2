"""Output of a run: a line for each trial, and on a terminal a bar."""

import contextlib
import io
import re

import jax
import pytest
from rich.console import Console

from ksana_jax import LLM
from ksana_jax.core.units import byte_size
from ksana_jax.lab.runs import progress
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.outlook import memory, outlook
from ksana_jax.lab.runs.records import WHOLE
from ksana_jax.lab.runs.run import run

pytestmark = pytest.mark.usefixtures("fake")


class Clock:
    """Ten seconds later at each look."""

    now = 0.0

    def __call__(self):
        self.now += 10
        return self.now


def small(model, **fields):
    grid = {"settings.x": [1, 2, 3]}
    return plan({"task": "fake", "model": model, "grid": grid, **fields})


def lines_of(experiment, folder):
    console = Console(file=io.StringIO(), width=40)
    lines = progress.Lines(console, Clock())
    run(experiment, folder, on_begin=lines.begin, on_end=lines.end)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_each_trial_is_a_line(model, tmp_path):
    first, second, third = lines_of(small(model), tmp_path)
    assert re.fullmatch(r"1/3  x=1, seed 0  \d\.\d s  ETA 20\.0 s  mean 10\.500", first)
    assert re.fullmatch(r"2/3  x=2, seed 0  \d\.\d s  ETA 10\.0 s  mean 20\.500", second)
    assert re.fullmatch(r"3/3  x=3, seed 0  \d\.\d s  mean 30\.500", third)


def test_trials_that_were_done_are_counted_and_say_nothing_of_the_time(model, tmp_path):
    run(small(model, grid={"settings.x": [1]}), tmp_path)
    first, second = lines_of(small(model), tmp_path)
    assert first.startswith("2/3  x=2") and "ETA 10.0 s" in first
    assert second.startswith("3/3  x=3")


def test_a_failed_trial_is_a_line_too(model, tmp_path):
    lines = lines_of(small(model, settings={"fail_at": 2}), tmp_path)
    assert "failed: RuntimeError: x is 2" in lines[1] and lines[1].startswith("2/3  x=2, seed 0")
    assert lines[2].startswith("3/3")


def test_trials_are_expected_to_take_as_long_as_their_tokens(model, tmp_path, monkeypatch, fake):
    monkeypatch.setattr(fake.Fake, "num_tokens", lambda self, config: 1000 * config["settings"]["x"])
    first, second, _ = lines_of(small(model), tmp_path)
    assert "ETA 50.0 s" in first and "ETA 20.0 s" in second  # after 10 s for 1,000, and 20 s for 3,000


@pytest.mark.parametrize(("answer", "ran"), [("", 1), ("no", 1), ("y", 3)])
def test_a_long_run_asks_on_a_terminal_whether_to_go_on(model, tmp_path, monkeypatch, answer, ran):
    monkeypatch.setattr(progress, "ASK_AFTER_S", 0)
    asked = []
    monkeypatch.setattr(Console, "input", lambda self, text: asked.append(text) or answer)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    going_on = contextlib.nullcontext() if ran == 3 else pytest.raises(progress.Declined)
    with going_on, progress.shown(terminal) as callbacks:
        run(small(model), tmp_path / "asked", **callbacks)
    (question,) = asked
    assert re.fullmatch(r"The rest takes about \d\.\d s \(--yes does not ask\)\. Go on\? \[y/N\] ", question)
    with progress.shown(terminal, yes=True) as callbacks:
        outcome = run(small(model), tmp_path / "asked", **callbacks)
    assert (outcome.num_skipped, outcome.num_done, len(asked)) == (ran, 3 - ran, 1)


def test_a_summary_that_fails_ends_no_run(model, tmp_path, monkeypatch, fake):
    monkeypatch.setattr(fake.Fake, "summarise", lambda self, measurements: 1 / 0)
    assert len(lines_of(small(model), tmp_path)) == 3


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min"), (150, "2 min"), (3599, "1 h 0 min"), (9000, "2 h 30 min")],
)
def test_durations_are_short(seconds, said):
    assert progress.duration(seconds) == said


def test_a_terminal_has_a_bar_with_the_time_left_below_the_lines(model, tmp_path):
    log = Console(file=io.StringIO())
    with progress.shown(log) as callbacks:
        run(small(model), tmp_path / "a", **callbacks)
    assert len(log.file.getvalue().splitlines()) == 3
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    run(small(model, grid={"settings.x": [1]}), tmp_path / "b")
    with progress.shown(terminal) as callbacks:
        run(small(model, settings={"sleep_s": 0.05}), tmp_path / "b", **callbacks)
    shown = terminal.file.getvalue()
    assert "ETA" in shown and "/3 trials" in shown
    assert all(f"{n}/3  x={n}, seed 0" in shown for n in (1, 2, 3))


def test_an_outlook_has_what_runs_how_long_it_takes_and_what_it_resolves(model, tmp_path, monkeypatch, fake, run_ksana):
    monkeypatch.setattr(fake.Fake, "num_tokens", lambda self, config: 1000 * config["settings"]["x"])
    whole = small(model, seeds=[0, 1, 2])
    assert outlook(whole, tmp_path / "none", WHOLE) == [
        "9 trials, about 18,000 tokens",
        "no estimate of the time until a first trial has finished in this folder",
        "3 seeds per row: the test resolves differences above 2.5 times their standard deviation over these",
    ]
    run(small(model, grid={"settings.x": [1]}, seeds=[0, 1, 2], settings={"sleep_s": 0.02}), tmp_path / "some")
    edited = small(model, seeds=[0, 1, 2], settings={"sleep_s": 0.02})
    lines = outlook(edited, tmp_path / "some", WHOLE)
    assert lines[:2] == ["6 of 9 trials to run, about 15,000 tokens; 3 are done", "to run: x=2 (3); x=3 (3)"]
    assert re.fullmatch(r"about \d\.\d s, at the speed of the trials that are done \(x=1\)", lines[2])
    with monkeypatch.context() as exactly:
        exactly.setattr("ksana_jax.lab.runs.outlook.duration", repr)
        one, several = outlook(edited, tmp_path / "some", WHOLE)[2:4]
    (whole_s,) = re.findall(r"about (\S+),", one)
    # Trials of 2, 2, 2, 3, 3 and 3 units of time.
    found = re.fullmatch(r"on several devices \(--on ray, --shard\) about (\S+) with 2, (\S+) with 4", several)
    assert found and [float(s) / float(whole_s) for s in found.groups()] == pytest.approx([8 / 15, 5 / 15])
    run(edited, tmp_path / "some")
    assert outlook(edited, tmp_path / "some", WHOLE) == ["all 9 trials are done"]
    again = outlook(small(model, seeds=[0, 1, 2], settings={"sleep_s": 0}), tmp_path / "some", WHOLE)
    assert "x=1, x=2, x=3: settings.sleep_s 0.02 → 0.0" in again
    other = outlook(small(model, name="other", settings={"sleep_s": 0.02}), tmp_path / "some", WHOLE)
    assert any(f"has the run of {edited.name!r}: its tables and figure will be replaced" in line for line in other)
    assert outlook(small(model), tmp_path, WHOLE)[-1].startswith("1 seed per row: no difference can be resolved")


def test_an_outlook_names_settings_that_rows_leave_to_different_defaults(model, tmp_path, fake):
    asked = {"h2o": {}, "snapkv": {}, "streaming_llm": {}, "tova": {"recent": 32}}
    rows = [{"name": n, "engine.kv_eviction": {"method": n, **more}} for n, more in asked.items()]
    lines = outlook(small(model, grid={}, variants=rows), tmp_path, WHOLE)
    assert "rows have different sinks, some by default: 0 (h2o, snapkv, tova); 4 (streaming_llm)" in lines
    assert "rows have different recent, some by default: 0.5 (h2o); 32 (snapkv, tova)" in lines
    same = [{"name": n, "engine.kv_eviction": {"method": n, "sinks": 4, "recent": 8}} for n in asked]
    assert not any("by default" in line for line in outlook(small(model, grid={}, variants=same), tmp_path, WHOLE))


def test_a_dry_run_runs_nothing(tmp_path, run_ksana):
    code, _, err = run_ksana("run", "quickstart", "--dry-run", "--out", tmp_path / "x")
    assert code == 0 and err.splitlines()[0] == "7 trials, about 79,872 tokens" and not (tmp_path / "x").exists()
    assert err.splitlines()[-1] == "at most 23.6 MiB of weights and KV pool at a time"


def test_memory_of_an_outlook_is_that_of_the_largest_engine(monkeypatch, fake):
    monkeypatch.setattr(fake.Fake, "num_tokens", lambda self, config: 1)
    sizes = {"num_blocks": 40, "max_num_seqs": 2}
    llm = LLM("ksana-tiny", **sizes)
    taken = sum(array.nbytes for array in jax.tree.leaves((llm.runner.params, llm.runner.cache)))
    assert memory(small("ksana-tiny", engine=sizes), WHOLE) == [
        f"at most {byte_size(taken)} of weights and KV pool at a time"
    ]
    [line] = memory(small("ksana-tiny", engine={"num_blocks": 10**9}), WHOLE)
    assert line.startswith("an engine cannot be made: 1,000,000,000 KV blocks of")
