"""Formats a comparison of runs or rows as a table, in Markdown or on a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from ksana_jax.lab.runs import tables
from ksana_jax.lab.runs.compare import Comparison, JoinedRow
from ksana_jax.lab.runs.dotted import changes_text
from ksana_jax.lab.runs.report import kind_of
from ksana_jax.lab.runs.significance import LEVEL, PER_CENT, Change, holm
from ksana_jax.lab.runs.tables import Grid, number_text
from ksana_jax.lab.runs.tasks.results import MISSING, Column

NOT_RESOLVED = "not resolved"


def grid(made: Comparison) -> Grid:
    """Returns the comparison as text, a line per number and row; the better side is bold."""
    heads = ["row", "number", made.a, made.b, "change", "pairs", "p"]
    cells, bold = [], []
    for column in made.columns:
        for row, change, p in zip(made.rows, *_tested(made, column.key), strict=True):
            if all(side is None or side.mean(column.key) is None for side in (row.a, row.b)):
                continue
            better = _better(row, column, p)
            sides = [MISSING if side is None else number_text(side, column) for side in (row.a, row.b)]
            shown = [MISSING, "0", MISSING]
            if change is not None:
                unit = " %" * change.relative
                shown = [change.text(column) + unit, str(change.num_pairs), "exact" if column.exact else _p(p)]
            cells.append([row.name, column.title, *sides, *shown])
            bold.append([False, False, better == "a", better == "b", False, False, False])
    return Grid(heads, cells, bold, 5)


def _tested(made: Comparison, key: str) -> tuple[list[Change | None], list[float | None]]:
    """Returns the changes of a number in all rows, and their p-values corrected for the number of rows."""
    changes = [row.change(key) for row in made.rows]
    return changes, holm([None if change is None else change.p for change in changes])


def _better(row: JoinedRow, column: Column, p: float | None) -> Literal["a", "b"] | None:
    """Returns the better side: p is below the level, or displayed exact counts differ."""
    a, b = (None if side is None else side.mean(column.key) for side in (row.a, row.b))
    if column.best is None or a is None or b is None or math.isnan(a) or math.isnan(b):
        return None
    if column.text(a) == column.text(b) if column.exact else p is None or p >= LEVEL:
        return None
    return "a" if (a < b) == (column.best == "min") else "b"


def _p(p: float | None) -> str:
    return NOT_RESOLVED if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def notes(made: Comparison) -> list[str]:
    """Returns the differences of the runs, and how to read the table."""
    joined = [row for row in made.rows if row.a is not None and row.b is not None]
    names: dict[str, list[str]] = {}
    for row in joined:
        names.setdefault(changes_text(row.differs), []).append(row.name)
    said = []
    for differs, found in names.items():
        which = "; ".join(found) if len(found) < len(joined) else f"{made.b} against {made.a}"
        said.append(f"{which}: {differs or 'the same settings'}.")
    for name, alone in (
        (made.a, [r for r in made.rows if r.b is None]),
        (made.b, [r for r in made.rows if r.a is None]),
    ):
        if alone:
            said.append(f"Only in {name}, or without one nearest row in the other: {'; '.join(r.name for r in alone)}.")
    if made.environment:
        said.append(f"Environment: {changes_text(made.environment)}.")
    return [*said, *made.notes, *_test_notes(made)]


def _test_notes(made: Comparison) -> list[str]:
    """Explains changes, p and the bold numbers."""
    keys = [column.key for column in made.columns if not column.exact]
    found = [change for key in keys for row in made.rows if (change := row.change(key)) is not None]
    said = []
    if any(change.p is not None for change in found):
        said.append(
            f"Change: from {made.a} to {made.b}, with the {PER_CENT} % confidence interval, uncorrected. p: "
            "two-sided paired t-test over the texts, questions or steps of both, or else over seeds, with Holm's "
            f"correction for the number of rows. Bold: better, with p below {LEVEL:g}; exact counts by any difference."
        )
    if any(change.num_pairs == 1 for change in found):
        said.append(f"One pair gives no standard deviation: {NOT_RESOLVED}.")
    return said


def markdown(made: Comparison) -> str:
    return tables.markdown(made.title, *grid(made), notes(made))


def latex(made: Comparison, name: str) -> str:
    """Returns a LaTeX table; name: of the run, see `tables.latex`."""
    kind = kind_of([side for row in made.rows for side in (row.a, row.b) if side is not None])
    return tables.latex(made.title, grid(made), notes(made), name, kind)


def terminal(made: Comparison):
    """Returns the table for a rich console."""
    return tables.terminal(*grid(made))


def plain(made: Comparison) -> dict[str, Any]:
    """Returns the comparison as plain values for JSON, with every number of the summaries, shown or not."""
    shown = {column.key: column for column in made.columns}
    sides = [side for row in made.rows for side in (row.a, row.b) if side is not None]
    keys = dict.fromkeys(key for side in sides for key in side.values)
    numbers: list[dict[str, Any]] = [{} for _ in made.rows]
    for key in keys:
        column = shown.get(key)
        for found, row, change, p in zip(numbers, made.rows, *_tested(made, key), strict=True):
            found[key] = {
                "title": None if column is None else column.title,
                "a": None if row.a is None else row.a.mean(key),
                "b": None if row.b is None else row.b.mean(key),
                **({} if change is None else dataclasses.asdict(change)),
                "p": p,
                "better": None if column is None else _better(row, column, p),
            }
    return {
        "a": made.a,
        "b": made.b,
        "task": made.task,
        "environment": {key: list(both) for key, both in made.environment.items()},
        "rows": [
            {
                "row": row.name,
                "a": None if row.a is None else row.a.name,
                "b": None if row.b is None else row.b.name,
                "differs": {key: list(both) for key, both in row.differs.items()},
                "numbers": found,
            }
            for row, found in zip(made.rows, numbers, strict=True)
        ],
        "notes": notes(made),
    }
