"""JSON records that no run writes: an error names the line, or the line is harmless; a repaired file resumes."""

import dataclasses
import json

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.records import read
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run

pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def experiment(model):
    return plan({"name": "small", "task": "fake", "model": model, "grid": {"settings.x": [1, 2]}})


@pytest.fixture
def written(experiment, tmp_path):
    """A folder of two finished trials and the lines of its records: a plan; of each its start, three measurements and
    done; a table."""
    run(experiment, tmp_path / "out")
    path = tmp_path / "out/records.jsonl"
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def swapped(records, i, j):
    records = list(records)
    records[i], records[j] = records[j], records[i]
    return records


def without(record, *names):
    return {k: v for k, v in record.items() if k not in names}


@pytest.mark.parametrize(
    "harmless",
    [
        lambda r: [*r, r[-1]],  # a doubled done
        lambda r: [*r[:6], {**r[1], "kind": "failed", "error": "late"}, *r[6:]],  # failed after it was done
        lambda r: [r[0], {**r[1], "kind": "failed", "error": "early"}, *r[1:]],  # failed before anything was measured
        lambda r: [*r[:3], *r[1:]],  # killed after one measurement, then run again
        lambda r: [*r, *r[1:6]],  # measured twice: the first counts
        lambda r: [r[0], *(without(x, "num_measurements") for x in r[1:])],  # as earlier versions wrote it
        lambda r: [*r[1:], r[0]],  # the plan last
        lambda r: [*r, {**r[1], "trial": "x", "config": "abc"}],  # a trial that says nothing, and has no end
        lambda r: [*r, {**r[1], "trial": "x", "config": {**r[1]["config"], "seed": float("nan")}}],
    ],
)
def test_lines_that_leave_no_doubt_about_the_results_change_nothing(written, harmless):
    path, records = written
    report(path.parent)
    expected = (path.parent / "table.csv").read_bytes()
    rewrite(path, harmless(records))
    made = report(path.parent)
    assert (path.parent / "table.csv").read_bytes() == expected
    assert made.failed == {}


@pytest.mark.parametrize(
    ("damage", "line", "said"),
    [
        (lambda r: [r[0], *r[2:]], 2, "which is not running there: no start before it"),
        (lambda r: swapped(r, 1, 5), 2, "ends trial .*, which is not running there"),
        (lambda r: swapped(r, 4, 5), 5, "after 3 measurements, the file has 2 of it"),
        (lambda r: [*r[:3], *r[2:]], 7, "after 3 measurements, the file has 4 of it"),
        (lambda r: [*r[:6], r[2], *r[6:]], 7, "measures trial .*, which is not running"),
        (lambda r: [without(r[0], "kind"), *r[1:]], 1, "is of kind None, must be one of plan, start"),
        (lambda r: [{**r[0], "kind": ["plan"]}, *r[1:]], 1, "is of kind"),
        (lambda r: [{**r[0], "kind": "begin"}, *r[1:]], 1, "is of kind 'begin'"),
        (lambda r: [without(r[0], "time"), *r[1:]], 1, "a plan line: it has no 'time'"),
        (lambda r: [without(r[0], "task"), *r[1:]], 1, "a plan line: it has no 'task'"),
        (lambda r: [{**r[0], "rows": [[]]}, *r[1:]], 1, r"a row of the plan: \[\] is not an object"),
        (lambda r: [{**r[0], "rows": [{**r[0]["rows"][0], "trials": [1]}]}], 1, "must be a list of ids"),
        (lambda r: [{**r[0], "rows": [r[0]["rows"][0], {**r[0]["rows"][1], "point": {}}]}], 1, "different points"),
        (lambda r: [*r, {**r[1], "kind": "failed"}], 13, "a failed line: it has no 'error'"),
        (lambda r: [r[0], {**r[1], "trial": ["a"]}, *r[2:]], 2, r"'trial' is \['a'\]"),
        (lambda r: [*r[:2], without(r[2], "metric"), *r[3:]], 3, "it has no 'metric'"),
        (lambda r: [*r, 5], 13, "is not a record"),
    ],
)
def test_a_line_out_of_place_is_named_and_the_run_goes_on_once_it_is_repaired(experiment, written, damage, line, said):
    path, records = written
    rewrite(path, damage(records))
    for reader in (report, lambda folder: run(experiment, folder)):
        with pytest.raises(ConfigError, match=rf"records\.jsonl line {line}\b.*{said}") as raised:
            reader(path.parent)
        assert "\n" not in str(raised.value)
    rewrite(path, [records[0], *records[6:]])  # the user took out the trial
    assert run(experiment, path.parent).num_done == 1
    assert len(read(path.parent).done) == 2


def test_a_line_nested_without_end_is_one_error(written):
    path, _ = written
    path.write_text('{"schema_version": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ConfigError, match="line 1 is not a record"):
        read(path.parent)


def test_measurements_that_the_task_did_not_write_are_refused_with_their_trial(written):
    path, records = written
    rewrite(path, [*records[:3], {**records[3], "value": "many"}, *records[4:]])
    with pytest.raises(ConfigError, match=f"trial {records[3]['trial']} are not those of task 'fake': TypeError"):
        report(path.parent)


def test_plans_are_ordered_by_their_place_and_number_and_not_by_clocks(experiment, written, monkeypatch):
    path, records = written
    rewrite(path, [{**records[0], "time": 4e9}, *records[1:]])  # by a clock that ran ahead
    other = dataclasses.replace(experiment, title="the newer one")
    run(other, path.parent)
    assert read(path.parent).plan["title"] == "the newer one"
    shard = records[0] | {"title": "of another file", "time": 0}
    for number, title in ((0, "the newer one"), (2, "of another file")):
        rewrite(path.with_name("records.2-of-2.jsonl"), [shard | {"number": number}])
        assert read(path.parent).plan["title"] == title
