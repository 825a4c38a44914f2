"""Output of a run: a line for each trial, and on a terminal a bar."""

import contextlib
import io
import re

import pytest
from rich.console import Console

from ksana_jax.lab.runs import progress
from ksana_jax.lab.runs.config import plan
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
    begin, first, second, third = lines_of(small(model), tmp_path)
    assert begin == "3 trials"
    assert re.fullmatch(r"1/3  x=1, seed 0  \d\.\d s  ETA 20\.0 s  mean 10\.500", first)
    assert re.fullmatch(r"2/3  x=2, seed 0  \d\.\d s  ETA 10\.0 s  mean 20\.500", second)
    assert re.fullmatch(r"3/3  x=3, seed 0  \d\.\d s  mean 30\.500", third)


def test_trials_that_were_done_are_counted_and_say_nothing_of_the_time(model, tmp_path):
    run(small(model, grid={"settings.x": [1]}), tmp_path)
    begin, first, second = lines_of(small(model), tmp_path)
    assert begin == "2 trials"
    assert first.startswith("2/3  x=2") and "ETA 10.0 s" in first
    assert second.startswith("3/3  x=3")


def test_a_failed_trial_is_a_line_too(model, tmp_path):
    lines = lines_of(small(model, settings={"fail_at": 2}), tmp_path)
    assert "failed: RuntimeError: x is 2" in lines[2] and lines[2].startswith("2/3  x=2, seed 0")
    assert lines[3].startswith("3/3")


def test_trials_are_expected_to_take_as_long_as_their_tokens(model, tmp_path, monkeypatch, fake):
    monkeypatch.setattr(fake.Fake, "num_tokens", lambda self, config: 1000 * config["settings"]["x"])
    begin, first, second, _ = lines_of(small(model), tmp_path)
    assert begin == "3 trials, about 6,000 tokens"
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
    assert len(lines_of(small(model), tmp_path)) == 4


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
    assert len(log.file.getvalue().splitlines()) == 4
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    run(small(model, grid={"settings.x": [1]}), tmp_path / "b")
    with progress.shown(terminal) as callbacks:
        run(small(model, settings={"sleep_s": 0.05}), tmp_path / "b", **callbacks)
    shown = terminal.file.getvalue()
    assert "ETA" in shown and "/3 trials" in shown
    assert all(f"{n}/3  x={n}, seed 0" in shown for n in (1, 2, 3))
