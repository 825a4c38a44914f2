"""Formats a comparison of two runs as a table, in Markdown or on a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ksana_jax.lab.runs import noise, tables
from ksana_jax.lab.runs.compare import ComparedNumber, Comparison, Differs, JoinedRow
from ksana_jax.lab.runs.tasks.results import Column, deviation, mean

NUM_RIGHT = 5  # columns of numbers: A, B, difference, pairs, p
NOT_RESOLVED = "not resolved"


def grid(made: Comparison) -> tuple[list[str], list[list[str]], list[list[bool]]]:
    """Returns the table as text: heads, cells, and which cells are better beyond the noise; a line per number, row."""
    heads = ["row", "number", made.a, made.b, f"{made.b} − {made.a}", "pairs", "p"]
    cells, bold = [], []
    for column in made.columns:
        for row in made.rows:
            if (number := row.numbers.get(column.key)) is None:
                continue
            better = number.better(column)
            cells.append([row.name, column.title, *_cells(number, column)])
            bold.append([False, False, better == "a", better == "b", False, False, False])
    return heads, cells, bold


def _cells(number: ComparedNumber, column: Column) -> list[str]:
    sides = [tables.with_deviation(values, column) for values in (number.a, number.b)]
    difference = tables.with_deviation(number.differences, column)
    if number.differences and mean(number.differences) > 0:
        difference = f"+{difference}"
    return [*sides, difference, str(len(number.differences)), _p(number, column)]


def _p(number: ComparedNumber, column: Column) -> str:
    if not number.differences:
        return tables.MISSING
    if column.exact:
        return "exact"
    if number.p is None:
        return NOT_RESOLVED
    return "<0.001" if number.p < 0.001 else f"{number.p:.3f}"


def notes(made: Comparison) -> list[str]:
    """Returns the differences of the runs, and how to read the table."""
    joined = [row for row in made.rows if row.a is not None and row.b is not None]
    common = _common(joined)
    said = [f"{made.b} differs from {made.a} in {_said(common)}."] if common else []
    if joined and not common and not any(row.differs for row in joined):
        said.append(f"{made.b} and {made.a} have the same settings.")
    said += [f"{row.name}: also {_said(own)}." for row in joined if (own := _without(row.differs, common))]
    for name, alone in (
        (made.a, [r for r in made.rows if r.b is None]),
        (made.b, [r for r in made.rows if r.a is None]),
    ):
        if alone:
            said.append(f"Only in {name}, or without one nearest row in the other: {'; '.join(r.name for r in alone)}.")
    if made.environment:
        said.append(f"Environment: {_said(made.environment)}.")
    return [*said, *made.notes, *_test_notes(made)]


def _test_notes(made: Comparison) -> list[str]:
    """Explains p and the bold numbers."""
    inexact = [
        number
        for row in made.rows
        for c in made.columns
        if not c.exact and (number := row.numbers.get(c.key)) is not None
    ]
    num_tests = sum(number.p is not None for number in inexact)
    said = []
    if num_tests:
        said.append(
            f"p: two-sided paired t-test, by text if both runs scored the same ones, else by seed; {num_tests} tests, "
            f"not corrected for their number. Bold: better, with p below {noise.SIGNIFICANT:g}; exact counts by any "
            "difference."
        )
    if any(len(number.differences) == 1 for number in inexact):
        said.append(f"One pair has no deviation: {NOT_RESOLVED}.")
    return said


def _common(rows: Sequence[JoinedRow]) -> Differs:
    """Returns the differences that all rows have."""
    first, *others = [row.differs for row in rows] or [{}]
    return {key: both for key, both in first.items() if all(other.get(key) == both for other in others)}


def _without(differs: Differs, common: Differs) -> Differs:
    return {key: both for key, both in differs.items() if key not in common}


def _said(differs: Differs) -> str:
    return ", ".join(f"{key} {_value(a)} → {_value(b)}" for key, (a, b) in differs.items())


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def markdown(made: Comparison) -> str:
    return tables.markdown_grid(made.title, *grid(made), NUM_RIGHT, notes(made))


def terminal(made: Comparison):
    """Returns the table for a rich console."""
    return tables.terminal_grid(*grid(made), NUM_RIGHT)


def plain(made: Comparison) -> dict[str, Any]:
    """Returns the comparison as plain values for JSON, with every number of the summaries, shown or not."""
    shown = {column.key: column for column in made.columns}
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
                "numbers": {key: _plain(number, shown.get(key)) for key, number in row.numbers.items()},
            }
            for row in made.rows
        ],
        "notes": notes(made),
    }


def _plain(number: ComparedNumber, column: Column | None) -> dict[str, Any]:
    sides = {"a": number.a, "b": number.b, "difference": number.differences}
    return {
        "title": None if column is None else column.title,
        **{name: _moments(values) for name, values in sides.items()},
        "num_pairs": len(number.differences),
        "p": number.p,
        "better": None if column is None else number.better(column),
    }


def _moments(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": mean(values) if values else None,
        "sd": deviation(values) if len(values) > 1 else None,
    }
