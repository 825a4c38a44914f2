"""Records of others are data: they are read without importing what they name, and show their own table."""

import csv
import io
import json
import shutil
import subprocess
import sys

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.plugins import trusting
from ksana_jax.lab.runs import recorded_results
from ksana_jax.lab.runs.combine import combine
from ksana_jax.lab.runs.compare import compare
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.export import export
from ksana_jax.lab.runs.recorded_results import RecordedResults, table_of
from ksana_jax.lab.runs.report import read_report, report
from ksana_jax.lab.runs.run import own_names, run
from ksana_jax.lab.runs.tasks.base import BaseTask, Column, kib, number
from ksana_jax.lab.runs.tasks.results import milliseconds, percent

TASK = '''
from ksana_jax.extend import BaseTask, Column

print("imported")

class Task(BaseTask):
    """Adds."""

    def run(self, trial):
        yield {"metric": "value", "value": trial.seed + 0.25}

    def summarise(self, measurements):
        return {"value": measurements[0]["value"], "share": measurements[0]["value"] / 10}

    def sample(self, key, measurements):
        return (key, (1, 2)) if key == "share" else None

    def columns(self, rows):
        return [
            Column("value", "a value, ms", lambda value: f"{1000 * value:,.1f}", "min"),
            Column("share", "a share", lambda share: f"<{share}>"),
        ]

    def notes(self, rows):
        return ["It adds."]

    def conclusion(self, rows):
        return "They are sums."
'''


@pytest.fixture
def make(tmp_path, monkeypatch, model):
    """Runs an own task into a folder, and forgets the task's module; text: its source."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # which gets the working directory

    def made(folder, text=TASK, **fields):
        (tmp_path / "adding.py").write_text(text)
        given = {"task": "adding:Task", "model": model, "seeds": [0, 1], **fields}
        assert run(plan(given), tmp_path / folder).num_done
        del sys.modules["adding"]
        return tmp_path / folder

    yield made
    sys.modules.pop("adding", None)


def test_a_run_of_an_own_task_is_shown_compared_and_exported_without_its_code(make, tmp_path, capfd):
    folder, twin = make("out"), make("twin", variants=[{"name": "other"}])
    own, capfd_text = report(folder, {"adding:Task"}), capfd.readouterr().out
    assert "imported" in capfd_text
    table = (folder / "table.md").read_text()
    sys.modules.pop("adding")
    (tmp_path / "adding.py").unlink()  # as it is where the records were sent
    made = report(folder)
    shown = "Shown by its records, without the code of task adding:Task; --own-code draws the task's own figure."
    assert made.notes == [own.notes[0], shown, *own.notes[1:]] and made.conclusion == own.conclusion == "They are sums."
    assert [c.title for c in made.columns] == ["a value, ms", "a share"] and "| 750.0 ±" in table
    shown = (folder / "table.md").read_text()
    assert "750.0 ±" in shown and "0.025 |" in shown and "<" not in shown  # no `Scaled` writes a share
    assert (folder / "figure.png").exists()
    rows = list(csv.DictReader(io.StringIO(export(folder))))
    assert [(row["seed"], row["value"], row["share"]) for row in rows] == [
        ("0", "0.25", "0.025"),
        ("1", "1.25", "0.125"),
    ]
    assert [row.label for row in combine([folder, twin]).rows] == ["out", "twin: other"]
    [row] = compare(folder, twin).rows
    change = row.change("share")
    assert (change.num_pairs, change.mean) == (1, 0.0)  # of the one sample
    assert "adding" not in sys.modules


@pytest.mark.parametrize("command", ["report", "report --csv", "compare"])
def test_commands_import_nothing_that_records_name_unless_told(make, command, tmp_path):
    folders = [str(make("out")), *([str(make("twin"))] * (command == "compare"))]
    for option in ((), ("--own-code",)):
        words = [*command.split(), *folders, *option]
        code = f"from ksana_jax.cli import main; main({words!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ("imported" in done.stdout) == bool(option)


def test_records_without_a_table_name_the_flag(make):
    folder = make("out")
    path = folder / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    bare = [{k: v for k, v in r.items() if k not in ("summary", "samples")} for r in lines if r["kind"] != "table"]
    path.write_text("".join(json.dumps(r) + "\n" for r in bare))
    with pytest.raises(ConfigError, match=r"'adding:Task': code .* runs only with --own-code; these records have no"):
        report(folder)
    assert len(report(folder, None).rows) == 1
    # A run that was killed has summaries, and no table yet.
    path.write_text("".join(json.dumps(r) + "\n" for r in lines if r["kind"] != "table"))
    sys.modules.pop("adding")
    assert [column.title for column in report(folder).columns] == ["value", "share"]


def test_a_task_that_is_no_longer_there_still_draws(make):
    folder = make("out")
    path = folder / "records.jsonl"
    path.write_text(path.read_text().replace("adding:Task", "adding_up"))
    assert [row.values["value"] for row in read_report(folder).rows] == [[0.25, 1.25]]


def test_facts_of_an_own_method_are_read_from_the_records(make, tmp_path):
    method = "from ksana_jax.methods.eviction.adakv import AdaKV\n\nclass Own(AdaKV):\n    pass\n"
    (tmp_path / "owning.py").write_text(method)
    setting = {"method": "owning:Own", "of": {"method": "snapkv"}, "budget": 8, "memory": "simulated"}
    folder = make("out", engine={"kv_eviction": setting})
    sys.modules.pop("owning")
    assert [row.simulated for row in read_report(folder).rows] == [True] and "owning" not in sys.modules


def test_edited_own_code_runs_again_and_reports_say_that_it_differs(make, model):
    folder = make("out")
    shutil.copytree(folder, folder.with_name("first"))
    comment = TASK.replace('"""Adds."""', '"""Adds numbers."""  # It does.')
    with pytest.raises(AssertionError):  # nothing is left to do
        make("out", comment)
    sys.modules.pop("adding")
    make("out", TASK.replace("+ 0.25", "- 0.25"))
    assert [row.values["value"] for row in read_report(folder).rows] == [[-0.25, 0.75]]
    said = "The code of these classes had several versions: adding:Task (2)."
    assert said in combine([folder, folder.with_name("first")]).notes
    compared = compare(folder.with_name("first"), folder)
    assert said in compared.notes and compared.rows[0].differs.keys() == {"code.adding:Task"}


def test_reports_name_the_versions_of_the_package_that_trials_ran_on(make):
    folder = make("out")
    path = folder / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for record, commit in zip((r for r in lines if r["kind"] == "start"), ("a" * 40, "b" * 40), strict=True):
        record["environment"] = {"commit": commit, "dirty": commit[0] == "b", "packages": {}}
    path.write_text("".join(json.dumps(r) + "\n" for r in lines))
    said = "The trials ran on 2 versions of ksana_jax: aaaaaaaa (1 trial), bbbbbbbb with uncommitted changes (1 trial)."
    assert said in read_report(folder).notes


def test_a_plan_s_own_code_is_trusted_and_no_other(make, tmp_path, model):
    folder = make("out")
    text = (folder / "records.jsonl").read_text().replace("adding:Task", "of_somebody:Task")
    (folder / "records.jsonl").write_text(text)
    (tmp_path / "of_somebody.py").write_text(TASK)
    made = plan({"task": "adding:Task", "model": model})
    assert own_names(made) == {"adding:Task"}
    run(made, folder)
    assert "of_somebody" not in sys.modules


WRITERS = {
    "number": number(3),
    "kib": kib,
    "percent": percent(),
    "ms": milliseconds(2),
    "lambda": lambda x: f"{x / 1e6:,.0f}",
}


def test_formats_of_columns_are_kept(monkeypatch):
    class Task(BaseTask):
        def run(self, trial): ...

        def summarise(self, measurements): ...

        def columns(self, rows):
            return [Column(name, name, write, "max", exact=name == "kib") for name, write in WRITERS.items()]

    table = json.loads(json.dumps(table_of(Task(), [])))
    found = RecordedResults("task", table).columns([])
    for column, write in zip(found, WRITERS.values(), strict=True):
        for value in (0.0, 1.0, 1234.5678, -3e7, 5e-4):
            assert column.write(value) == write(value)
    assert [c.exact for c in found] == [name == "kib" for name in WRITERS] and {c.best for c in found} == {"max"}
    assert recorded_results._format(lambda x: "fast" if x else "slow") is None


def test_a_strange_table_is_refused_in_one_sentence_or_read(make):
    folder = make("out")
    path, refused = folder / "records.jsonl", 0
    text = path.read_text().splitlines()
    for key in "columns headline notes conclusion measures_speed num_trials format best title".split():
        for value in (None, 0, "x", [], [1], [{}], {"a": 1}, [1, 1e400, 1], -1):
            table = json.loads(text[-1])
            (table["columns"][0] if key in ("format", "best", "title") else table)[key] = value
            path.write_text("\n".join([*text[:-1], json.dumps(table), ""]))
            try:
                read_report(folder)
            except ConfigError as error:
                assert "\n" not in str(error)
                refused += 1
    assert 20 < refused < 60


def test_trust_is_of_the_block_that_grants_it():
    with trusting({"a:b"}):
        pass
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        plan({"task": "no_such_module:Task"})
