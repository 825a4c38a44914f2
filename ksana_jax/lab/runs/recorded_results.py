"""Shows the results of a task by what its records say of them, without its code: it may be gone, or not be trusted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ksana_jax.core.own_code import names_code
from ksana_jax.lab.runs import plain_json
from ksana_jax.lab.runs.tasks.base import Results
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, Scaled

_PROBES = (1e9, 0.0, 12.3456)


def summary_of(task: Results, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Returns fields of a `done` record: a trial's numbers and their samples; none if the task's code fails."""
    try:
        values = task.summarise(measurements)
        samples = {key: sample for key in values if (sample := task.sample(key, measurements)) is not None}
        plain_json.dumps(found := {"summary": values, "samples": samples})
    except Exception:  # the report says why
        return {}
    return found


def table_of(task: Results, rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Returns the fields of a `table` record: columns with their formats, notes and the summary sentence."""
    columns, headline = task.columns(rows), task.headline(rows)
    return {
        "columns": [
            {"key": c.key, "title": c.title, "best": c.best, "exact": c.exact, "format": _format(c.write)}
            for c in columns
        ],
        "headline": None if headline is None else headline.key,
        "notes": task.notes(rows),
        "conclusion": task.conclusion(rows),
        "measures_speed": task.measures_speed,
        "num_trials": sum(len(row.trials) for row in rows),
    }


def _format(write: Callable[[float], str]) -> list[Any] | None:
    """Returns [factor, digits, trims, signed] of the `Scaled` that writes numbers as a function does, or None."""
    found = re.fullmatch(r"(\+?)([\d,]+)(?:\.(\d+))?", write(_PROBES[0]))
    if found is None:
        return None
    factor, digits = float(found[0].replace(",", "")) / _PROBES[0], len(found[3] or "")
    for trims in (False, True):
        scaled = Scaled(factor, max(digits, int(trims)), trims, bool(found[1]))
        if [scaled(x) for x in _PROBES] == [write(x) for x in _PROBES]:
            return [scaled.factor, scaled.digits, scaled.trims, scaled.signed]
    return None


class RecordedResults(Results):
    """Results of a task by its name, `table` record and summaries of trials.

    Args:
      table: the record; None of a run that did not end, whose numbers are then shown under their keys.

    Raises:
      TypeError, ValueError, KeyError, AttributeError: the record is not one of `table_of`.
    """

    def __init__(self, name: str, table: Mapping[str, Any] | None):
        self.name, self._table = name, table or {}
        self._columns = [_column(given) for given in self._table.get("columns", ())]
        self._notes = [str(note) for note in self._table.get("notes", ())]
        self.measures_speed = self._table.get("measures_speed") is not False  # pyright: ignore[reportAttributeAccessIssue]

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        raise NotImplementedError("the records have the summaries")

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        keys = dict.fromkeys(key for row in rows for key in row.values)
        return self._columns or [Column(key, key, _plain) for key in keys]

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        return next((c for c in self.columns(rows) if c.key == self._table.get("headline")), None)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        shown = f"Shown by its records, without the code of task {self.name}; --own-code draws the task's own figure."
        return [shown] * names_code(self.name) + (self._notes if self._is_of(rows) else [])

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        return str(self._table.get("conclusion", "")) if self._is_of(rows) else ""

    def _is_of(self, rows: Sequence[ResultRow]) -> bool:
        return self._table.get("num_trials") == sum(len(row.trials) for row in rows)


def _column(given: Mapping[str, Any]) -> Column:
    write, best = _plain, given.get("best")
    if (shape := given["format"]) is not None:
        factor, digits, *how = shape
        write = Scaled(float(factor), min(max(int(digits), 0), 17), *map(bool, how))
    return Column(
        str(given["key"]),
        str(given["title"]),
        write,
        best if best in ("min", "max") else None,
        given.get("exact") is True,
    )


def _plain(value: float) -> str:
    return f"{value:,.4g}"
