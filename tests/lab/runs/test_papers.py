"""Published results beside ours: papers name rows that their studies have, and orders are compared beyond the noise."""

import shutil
import sys
from pathlib import Path

import pytest

from ksana_jax.core import shipped
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import papers
from ksana_jax.lab.runs.papers import Published, Study, agreement
from ksana_jax.lab.runs.report import read_report
from ksana_jax.lab.runs.tasks.results import ResultRow

ROOT = Path(__file__).parents[3]
STUDIES = [
    (name, study) for name in shipped.papers() for p in [papers.read(name)] for study in (p.quick, p.full) if study
]


@pytest.mark.parametrize(("name", "study"), STUDIES, ids=[f"{name}-{study.study}" for name, study in STUDIES])
def test_a_papers_rows_are_measured_by_its_study(name, study):
    paper = papers.read(name)
    report = read_report(ROOT / "experiments" / study.study)
    for row, theirs in study.rows.items():
        assert any(row in column.numbers for column in paper.published)
        assert [r.mean(study.column) is not None for r in report.rows if r.name == theirs] == [True]
    assert paper.relative_to is None or paper.relative_to in study.rows


def rows(**values):
    return {name: ResultRow(name, {}, 3, [], {"x": given}) for name, given in values.items()}


def study(best="min"):
    return Study("any", 1, "ours", "x", best, {})


def test_an_order_is_the_same_the_opposite_or_not_resolved():
    ours = rows(a=[1.0, 1.1, 1.3], b=[2.0, 2.2, 2.2], c=[2.0, 2.3, 2.1], d=[0.1, 0.3, 0.3])
    told = agreement(Published("theirs", "min", {"a": 10, "b": 20, "c": 30, "d": 40}), ours, study())
    assert told == (
        "theirs: disagrees in kind. Of 6 pairs of rows that the paper orders, 2 have the same order here, 1 are not "
        "resolved; the opposite order: 'a' and 'd'; 'b' and 'd'; 'c' and 'd'."
    )


def test_accuracy_and_perplexity_are_compared_by_which_is_better():
    ours = rows(good=[1.0, 1.1, 1.2], bad=[2.0, 2.1, 2.3])
    assert "disagrees" in agreement(Published("theirs", "max", {"good": 10, "bad": 20}), ours, study())
    assert ": agrees" in agreement(Published("theirs", "max", {"good": 20, "bad": 10}), ours, study())


def test_published_numbers_that_are_all_but_equal_have_no_order():
    ours = rows(a=[1.0, 1.1], b=[2.0, 2.1])
    told = agreement(Published("theirs", "min", {"a": 12.12, "b": 12.11}), ours, study())
    assert "nothing is resolved. Of 0 pairs" in told


def test_a_finished_study_is_shown_beside_the_paper(tmp_path, run_ksana):
    out = shutil.copytree(ROOT / "experiments/orca", tmp_path / "orca")
    code, printed, _ = run_ksana("reproduce", "orca", "--out", out)
    assert code == 0 and "36.9" in printed and "agrees in kind" in printed
    table = (out / "paper.md").read_text()
    assert "| iteration-level batching | 36.9 | 38.75 |" in table and "FasterTransformer" in table


def test_our_numbers_are_in_the_unit_of_the_study(tmp_path, run_ksana, monkeypatch):
    out = shutil.copytree(ROOT / "experiments/pretrained_recall", tmp_path / "recall")
    monkeypatch.setattr(papers, "run_and_report", lambda *given: 0)  # it would ask for the model
    assert run_ksana("reproduce", "snapkv", "--out", out)[0] == 0
    assert "| SnapKV | 17.92 | 40.76 | 24.92 | 8.333 |" in (out / "paper.md").read_text()


def test_records_import_no_code_that_they_name(tmp_path, run_ksana, monkeypatch):
    out = shutil.copytree(ROOT / "experiments/orca", tmp_path / "orca")
    records = out / "records.jsonl"
    records.write_text(records.read_text().replace('"task": "capacity"', '"task": "of_somebody:Task"'))
    (tmp_path / "of_somebody.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # which gets the working directory
    monkeypatch.setattr(papers, "run_and_report", lambda *given: 0)  # it would run the plan's own task
    code, _, error = run_ksana("reproduce", "orca", "--out", out)
    assert code == 2 and "'of_somebody:Task': code that a file names runs only with --own-code" in error


def test_all_papers_are_listed(run_ksana):
    code, printed, _ = run_ksana("list", "papers")
    assert code == 0 and [line.split()[0] for line in printed.splitlines()] == shipped.papers()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["snapvk"], f"the papers are {', '.join(shipped.papers())}; the nearest is 'snapkv'"),
        (["nosuch"], f"there is no paper 'nosuch'; the papers are {', '.join(shipped.papers())}"),
        (["orca", "--full"], "orca has no longer study: `ksana reproduce orca` is all of it"),
    ],
)
def test_what_is_not_there_is_refused(options, problem, run_ksana):
    code, _, error = run_ksana("reproduce", *options)
    assert code == 2 and problem in " ".join(error.split())


def test_a_row_that_a_study_lacks_is_named():
    report = read_report(ROOT / "experiments/orca")
    with pytest.raises(ConfigError, match=r"has no row 'nosuch'; its rows are 'iteration-level', 'request-level'$"):
        papers._row_named(report, "nosuch")
