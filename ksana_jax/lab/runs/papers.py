"""Published results next to ours: `ksana reproduce`. A paper is a YAML file in configs/papers, see `Paper`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from rich.console import Console
from rich.markup import escape

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.plugins import nearest_hint
from ksana_jax.core.shipped import CONFIGS, papers
from ksana_jax.lab.runs import significance
from ksana_jax.lab.runs.command import run_and_report
from ksana_jax.lab.runs.report import Report, read_report
from ksana_jax.lab.runs.tables import MISSING, markdown, terminal
from ksana_jax.lab.runs.tasks.results import ResultRow, Scaled

EQUAL = 0.01  # published numbers that differ by less, relative to the larger, have no order


@dataclasses.dataclass(frozen=True)
class Study:
    """The experiment that repeats a paper's. study: its name. minutes: on two CPU cores. column: key of its results.

    best: whether less or more of it is better. of: heading of our column. rows: {row of the paper: row of the study, as
    figures name it}. overrides: further settings, as for `ksana run`.
    """

    study: str
    minutes: int
    of: str
    column: str
    best: Literal["min", "max"]
    rows: dict[str, str]
    overrides: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Published:
    """A published column. of: model, text and size. best: as of a study. numbers: {row: number}, of measured rows."""

    of: str
    best: Literal["min", "max"]
    numbers: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper's results and the studies that repeat them.

    source: where the numbers stand. claim: one sentence. unit: of all numbers.
    relative_to: the row by which all numbers are divided; None for absolute ones. difference: what model, text and
    sizes of our study change. quick: minutes; full: hours, null if there is no longer one.
    """

    title: str
    source: str
    claim: str
    unit: str
    published: list[Published]
    difference: str
    quick: Study
    full: Study | None = None
    relative_to: str | None = None


def read(name: str) -> Paper:
    """Returns a paper by its name.

    Raises:
      ConfigError: there is no such paper; names them all.
    """
    if name not in (known := papers()):
        raise ConfigError(f"there is no paper {name!r}; the papers are {', '.join(known)}{nearest_hint(name, known)}")
    assert CONFIGS is not None
    given = yaml.safe_load((CONFIGS / "papers" / f"{name}.yaml").read_text(encoding="utf-8"))
    given["published"] = [Published(**column) for column in given["published"]]
    return Paper(**given | {key: Study(**given[key]) for key in ("quick", "full") if given.get(key)})


def show_papers() -> None:
    """Prints a line for each paper: its title, the minutes of the study, and those of the longer one."""
    for name in papers():
        paper = read(name)
        full = "" if paper.full is None else f", {paper.full.minutes} with --full"
        print(f"{name:16} {paper.title} ({paper.quick.minutes} minutes{full})")


def reproduce(name: str, full: bool = False, out: Path | None = None) -> int:
    """Runs the study of a paper, prints its report, then the published numbers next to ours.

    Args:
      out: output folder; None takes runs/papers/NAME, or NAME-full.

    Returns:
      Exit code as `run_and_report`.

    Raises:
      ConfigError: there is no such paper, or no longer study of it.
    """
    paper = read(name)
    study = paper.full if full else paper.quick
    if study is None:
        raise ConfigError(f"{name} has no longer study: `ksana reproduce {name}` is all of it")
    folder = out or Path("runs/papers") / (f"{name}-full" if full else name)
    if code := run_and_report(Path(study.study), study.overrides, folder):
        return code
    report = read_report(folder)
    ours = {row: _row_named(report, theirs) for row, theirs in study.rows.items()}
    heads = [paper.unit, *(column.of for column in paper.published), study.of]
    factor = next((c.write.factor for c in report.columns if c.key == study.column and isinstance(c.write, Scaled)), 1)
    cells = [
        [row, *(_text(c.numbers.get(row)) for c in paper.published), _text(_ours(paper, study, ours, row, factor))]
        for row in ours
    ]
    plain = [[False] * len(heads) for _ in cells]
    notes = [agreement(column, ours, study) for column in paper.published]
    notes.append(f"Differences: {paper.difference}")
    title = f"{paper.title}, {paper.source}"
    write_atomic(folder / "paper.md", markdown(title, heads, cells, plain, len(heads) - 1, notes))
    console = Console(highlight=False)
    console.print(f"\n[italic]{escape(title)}[/italic]", terminal(heads, cells, plain, len(heads) - 1))
    for note in notes:
        console.print(escape(note))
    console.print(f"{escape(str(folder))}: paper.md")
    return 0


def agreement(published: Published, ours: Mapping[str, ResultRow], study: Study) -> str:
    """Says for how many pairs of rows the better one is the same in both, or not resolved here."""
    key, alike = study.column, study.best == published.best
    same, opposite, num_unresolved = 0, [], 0
    numbers = {row: number for row, number in published.numbers.items() if row in ours}
    ordered = [
        (a, b) for a, b in itertools.combinations(numbers, 2) if not math.isclose(numbers[a], numbers[b], rel_tol=EQUAL)
    ]
    resolved = significance.differ([(ours[a], ours[b]) for a, b in ordered], key)
    for (a, b), differ in zip(ordered, resolved, strict=True):
        if not differ:
            num_unresolved += 1
        elif ((ours[a].mean(key) or 0.0) < (ours[b].mean(key) or 0.0)) == (alike == (numbers[a] < numbers[b])):
            same += 1
        else:
            opposite.append(f"{a!r} and {b!r}")
    kind = "disagrees in kind" if opposite else "agrees in kind" if same else "nothing is resolved"
    told = f"{published.of}: {kind}. Of {same + len(opposite) + num_unresolved} pairs of rows that the paper orders, "
    told += f"{same} have the same order here, {num_unresolved} are not resolved"
    return f"{told}; the opposite order: {'; '.join(opposite)}." if opposite else f"{told}, none has the opposite one."


def _row_named(report: Report, name: str) -> ResultRow:
    found = [row for row in report.rows if row.name == name]
    if not found:
        known = ", ".join(repr(row.name) for row in report.rows)
        raise ConfigError(f"{report.name} has no row {name!r}; its rows are {known}")
    return found[0]


def _ours(paper: Paper, study: Study, ours: Mapping[str, ResultRow], row: str, factor: float) -> float | None:
    value = ours[row].mean(study.column)
    if value is None or paper.relative_to is None:
        return None if value is None else value * factor
    return value / (ours[paper.relative_to].mean(study.column) or math.nan)


def _text(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
