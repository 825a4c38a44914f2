"""`make bench`: what is run in the time there is, and the part of docs/use/benchmarks.md that it writes."""

import dataclasses

import make_bench as suite
import pytest
from make_bench import BEGIN, END, SUITE, Entry

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import resolve
from ksana_jax.lab.bench import BENCHES
from ksana_jax.lab.runs.report import Report
from ksana_jax.lab.runs.tasks.results import Column, ResultRow

HOST = "experiments.benches.host:Host"


def report(title, conclusion="", notes=()):
    row = ResultRow("", {"rows": 4}, 1, [[]], {"step_us": [2.0]})
    return Report("bench", title, None, [row], [Column("step_us", "step", str)], [*notes], conclusion, {})


@pytest.fixture
def clock(monkeypatch):
    """Minutes that pass: each benchmark takes three."""
    passed, asked = [0.0], []

    def run_and_show(bench, *, repeats, out, as_json):
        passed[0] += 180.0
        asked.append((type(bench).__name__, repeats, out.name, getattr(bench, "peers", None)))
        return report(out.name)

    monkeypatch.setattr(suite, "run_and_show", run_and_show)
    return lambda: passed[0], asked


def test_what_does_not_fit_the_time_is_left_out(clock, tmp_path):
    now, asked = clock
    entries = [Entry("a", HOST, 4, {}, 2, peers=True), Entry("b", "latency", 8, {}), Entry("c", "latency", 4, {})]
    made, left_out = suite.run_suite(tmp_path, "env", 10, entries=entries, clock=now)
    assert asked == [("Host", 2, "a", "env"), ("Latency", 1, "c", None)]
    assert [entry.folder for entry in left_out] == ["b"]
    assert "Not measured, for want of time: b." in suite.performance(made, left_out)


def test_a_suite_that_is_resumed_reads_what_is_there_with_the_same_options(tmp_path, monkeypatch):
    rows = {"rows": (2,), "steps": 2, "context": 20}
    entry = Entry("a", HOST, 1, rows)
    [(_, first)], _ = suite.run_suite(tmp_path, "", 10, entries=[entry])
    asked = []
    monkeypatch.setattr(suite, "run_and_show", lambda bench, **_: asked.append(bench) or report("again"))
    [(_, kept)], left_out = suite.run_suite(tmp_path, "", 0, True, [entry])
    assert (asked, left_out, kept.title, kept.notes) == ([], [], first.title, first.notes)
    assert kept.rows[0].mean("step_us") == first.rows[0].mean("step_us")
    for other in (Entry("a", HOST, 1, rows | {"steps": 3}), Entry("a", HOST, 1, rows, 2), Entry("b", HOST, 1, rows)):
        suite.run_suite(tmp_path, "", 10, True, [other])
    suite.run_suite(tmp_path, "", 10, False, [entry])
    assert len(asked) == 4


def test_the_whole_suite_fits_its_time_and_has_options_that_exist():
    assert sum(entry.minutes for entry in SUITE) <= 20
    for entry in SUITE:
        bench = resolve(entry.bench, BENCHES, "bench")(**entry.options)
        assert bench.cases() and (not entry.peers or "peers" in {f.name for f in dataclasses.fields(bench)})


def test_the_summary_has_tables_conclusions_and_how_it_was_measured():
    notes = ["A machine.", "Other programs took 1%."]
    made = [
        (Entry("a", HOST, 1, {}, table=True), report("Host loop", "Twice as fast.", notes)),
        (Entry("b", HOST, 1, {}, table=True), report("Again", "", ["Bound: 3.", *notes])),
        (Entry("c", "latency", 1, {}), report("Latency", "Low.", [*notes, "That is a busy machine: so."])),
    ]
    table = "| rows | step |\n| --- | ---: |\n| 4 | 2.0 |"
    assert suite.summary(made, []) == (
        f"**Host loop**\n\n{table}\n\nTwice as fast.\n\nA machine.  \nOther programs took 1%.\n\n"
        f"**Again**\n\n{table}\n\nBound: 3.  \nOther programs took 1%.\n\n"
        "**Latency.** Low. Other programs took 1%. That is a busy machine: so.\n"
    )


def test_only_what_is_between_the_marks_is_replaced():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert suite.replace_between(text, "new\n") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for wrong in ("none", f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"):
        with pytest.raises(ConfigError, match="once each"):
            suite.replace_between(wrong, "")
