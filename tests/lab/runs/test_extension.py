"""A task of the user's own, named in the YAML file: the example, and what is said of one that cannot be."""

import subprocess
import sys
from pathlib import Path

import fake_task
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import load, plan
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.tasks.base import BaseTask, Column, ResultRow, number

pytestmark = pytest.mark.usefixtures("few_shapes")
EXAMPLES = Path(__file__).parents[3] / "examples"


class Minimal(BaseTask):
    """Nothing but what a task must give."""

    def run(self, trial):
        yield {"metric": "value", "value": float(trial.seed)}

    def summarise(self, measurements):
        return {"value": measurements[0]["value"], "other": 3.0}

    def columns(self, rows):
        return [Column("value", "value", number(1), "max"), Column("other", "other", number(1))]


class Partial(BaseTask):
    def run(self, trial):
        yield {}


def test_the_example_finds_keys_that_the_window_still_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(EXAMPLES)])
    settings = ["settings.num_prompts=4", "seeds=[0]"]
    outcome = run(load(EXAMPLES / "passkey.yaml", settings), tmp_path / "out")
    assert not outcome.failed
    made = report(tmp_path / "out")
    assert [row.label for row in made.rows] == ["full", "window"]
    full, window = (row.mean("recall") for row in made.rows)
    assert full is not None and window is not None and full > window
    assert (tmp_path / "out/figure.png").stat().st_size > 0
    with pytest.raises(ConfigError, match=r"settings\.num_prompts is 0"):
        load(EXAMPLES / "passkey.yaml", ["settings.num_prompts=0"])


def test_a_task_needs_run_summarise_and_columns_only(model, tmp_path):
    made = plan({"task": "test_extension:Minimal", "model": model, "seeds": [1, 2]})
    assert run(made, tmp_path / "out").num_done == 2
    (row,) = report(tmp_path / "out").rows
    assert row.mean("value") == 1.5
    with pytest.raises(ConfigError, match=r"unknown key 'settings\.x' of task '.*'; there are none here"):
        plan({"task": "test_extension:Minimal", "model": model, "settings": {"x": 1}})


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("test_extension:Partial", "which lacks columns, summarise"),
        ("test_extension:Nothing", "has no 'Nothing'"),
        ("no_such_module:Task", "there is no module 'no_such_module'"),
        ("fake_task:FakeSettings", "which is not a subclass of ksana_jax.extend.BaseTask"),
        ("perplexitty", "the nearest is 'perplexity'. A task of your own is 'package.module:Class'"),
    ],
)
def test_what_is_no_task_is_refused(model, task, said):
    with pytest.raises(ConfigError, match=said):
        plan({"task": task, "model": model})


def test_a_task_is_found_in_the_working_directory_by_the_command(tmp_path):
    (tmp_path / "my_tasks.py").write_text("x = 1\nclass Task:\n    pass\n")
    (tmp_path / "mine.yaml").write_text("task: my_tasks:Task\n")
    command = [sys.executable, "-c", "from ksana_jax.cli import main; main(['run', 'mine.yaml'])"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "my_tasks:Task', which is not a subclass of" in done.stderr) == (2, True)


def row(label, point, **values):
    return ResultRow(label, point, 2, [[]], values)


def drawn(rows):
    from matplotlib.figure import Figure

    figure = Figure()
    Minimal().draw(figure, rows)
    return figure.axes


def test_the_default_figure_of_a_grid_of_numbers_is_lines_against_its_last_key():
    rows = [
        row("", {"a.kind": kind, "a.n": n}, value=[n + k, n + k + 1.0])
        for k, kind in enumerate("xy")
        for n in (3, 1, 2)
    ]
    (axes,) = drawn(rows)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("n", "value")
    first, of_seeds, second, _ = axes.lines
    assert (first.get_label(), second.get_label()) == ("kind x", "kind y")
    assert first.get_xydata().tolist() == [[1, 1.5], [2, 2.5], [3, 3.5]]
    assert of_seeds.get_xydata().tolist() == [[1, 1], [1, 2], [2, 2], [2, 3], [3, 3], [3, 4]]
    # n is counted: no ticks at halves.
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_the_default_figure_of_named_rows_is_bars():
    (axes,) = drawn([row("a", {}, value=[1.0]), row("b", {}, value=[0.0, 4.0]), row("c", {"k": True}, value=[])])
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0, 0.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c, k True"]
    assert axes.get_xlabel() == "value"


def test_the_default_figure_of_nothing_is_empty():
    assert drawn([]) == []


def test_the_fake_task_of_these_tests_is_a_task(fake):
    assert isinstance(task_named("fake"), fake_task.Fake)
