"""Shows the results of a task by what its records say of them, without its code: it may be gone, or not be trusted."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ksana_jax.core.own_code import names_code
from ksana_jax.lab.runs import plain_json
from ksana_jax.lab.runs.tasks.base import Results
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow, Scaled

_PROBES = (1e9, 0.0, 12.3456)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The numbers of a trial by key, the sample of those measured on one, and the parts of those on several."""

    numbers: Mapping[str, float]
    samples: Mapping[str, Hashable]
    parts: Mapping[str, Mapping[Hashable, Part]]

    @classmethod
    def of(cls, task: Results, measurements: Sequence[Measurement]) -> Summary:
        numbers = task.summarise(measurements)
        samples = {key: sample for key in numbers if (sample := task.sample(key, measurements)) is not None}
        return cls(numbers, samples, task.parts(measurements))

    @classmethod
    def read(cls, done: Mapping[str, Any]) -> Summary:
        """Returns what a `done` record says."""
        parts = {
            key: {_hashable(sample): Part(value, weight) for sample, value, weight in found}
            for key, found in done.get("parts", {}).items()
        }
        return cls(done["summary"], {k: _hashable(sample) for k, sample in done.get("samples", {}).items()}, parts)

    def plain(self) -> dict[str, Any]:
        """Returns the fields of a `done` record."""
        parts = {key: [[sample, *part] for sample, part in found.items()] for key, found in self.parts.items()}
        return {"summary": dict(self.numbers), "samples": dict(self.samples), **({"parts": parts} if parts else {})}

    def check(self) -> None:
        """Raises a TypeError unless all are numbers, finite or not, and samples can be compared."""
        for key, value in self.numbers.items():
            math.isfinite(value)
            hash(self.samples.get(key))
        for part in (part for found in self.parts.values() for part in found.values()):
            math.isfinite(part.value + part.weight)


def _hashable(value: Any) -> Hashable:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def summary_of(task: Results, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Returns the fields of a `done` record that have a trial's numbers; none if the task's code fails."""
    try:
        found = Summary.of(task, measurements).plain()
        plain_json.dumps(found)
    except Exception:  # the report says why
        return {}
    return found


def table_of(task: Results, rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Returns the fields of a `table` record: columns with their formats, notes and the summary sentence."""
    columns, headline = task.columns(rows), task.headline(rows)
    return {
        "columns": [
            {
                "key": c.key,
                "title": c.title,
                "best": c.best,
                "exact": c.exact,
                "change": c.change,
                "note": c.note,
                "format": _format(c.write),
            }
            for c in columns
        ],
        "headline": None if headline is None else headline.key,
        "notes": task.notes(rows),
        "conclusion": task.conclusion(rows),
        "measures_speed": task.measures_speed,
        "geometric": task.geometric,
        "samples": task.samples,
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
        self.geometric = self._table.get("geometric") is True  # pyright: ignore[reportAttributeAccessIssue]
        self.samples = str(self._table.get("samples", "seeds"))  # pyright: ignore[reportAttributeAccessIssue]

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
        str(given.get("change", "")),
        str(given.get("note", "")),
    )


def _plain(value: float) -> str:
    return f"{value:,.4g}"
