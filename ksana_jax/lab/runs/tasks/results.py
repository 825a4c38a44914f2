"""Rows and columns of a task's table of results. Knows numbers and their formatting, no task."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

Measurement = dict[str, Any]
MISSING = "—"
SIMULATED = " (simulated memory)"  # ends the label of a row of simulated memory


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table. key: key of the summary. write: formats a value. best: "min" or "max" is set in bold.

    exact: whether equal work gives equal values, as for counts: a deviation of 0 is not shown, and any displayed
    difference counts. Other columns are subject to noise, see `ksana_jax.lab.runs.noise`.
    """

    key: str
    title: str
    write: Callable[[float], str]
    best: Literal["min", "max"] | None = None
    exact: bool = False

    def text(self, value: float) -> str:
        """Formats a value; infinity and NaN are written alike in all columns."""
        return self.write(value) if math.isfinite(value) else not_finite(value)


def not_finite(value: float) -> str:
    """Formats infinity or NaN."""
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def number(digits: int) -> Callable[[float], str]:
    """Returns a formatter with the given number of decimals and commas between thousands."""
    return lambda value: f"{value:,.{digits}f}" if math.isfinite(value) else not_finite(value)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Formats values in another unit, of which one is `factor` units; figures draw them in it, too.

    trims: leaves out a decimal of 0. signed: writes + before numbers that are not negative.
    """

    factor: float
    digits: int
    trims: bool = False
    signed: bool = False

    def __call__(self, value: float) -> str:
        text = number(self.digits)(self.factor * value)
        text = text.removesuffix(".0") if self.trims else text
        return f"+{text}" if self.signed and value >= 0 else text


def percent(digits: int = 1) -> Scaled:
    """Returns a formatter of fractions as percentages."""
    return Scaled(100, digits)


def milliseconds(digits: int = 1) -> Scaled:
    """Returns a formatter of seconds as milliseconds."""
    return Scaled(1000, digits)


kib = Scaled(1 / 1024, 1, trims=True)


def mean(values: Sequence[float]) -> float:
    """Returns the mean; infinite or NaN if the sum is."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):  # it refuses sums beyond the largest float, and inf - inf
        return sum(value / len(values) for value in values)


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of two or more values; if some are not finite, NaN, or 0 if all are equal."""
    if all(math.isfinite(value) for value in values):
        try:
            return statistics.stdev(values)
        except OverflowError:
            return math.inf
    return 0.0 if all(value == values[0] for value in values) else math.nan


@dataclasses.dataclass(frozen=True)
class ResultRow:
    """A row of the table with its results. trials: the measurements of each finished trial, one trial per seed.

    values: {summary key: its values}, one per sample; among trials with the same sample, the first counts.
    samples: {summary key: the sample of each value}; see `Results.sample`.
    config: settings of its trials other than the defaults, see `identity.defining`; empty without a finished trial.
    simulated: whether its memory is simulated, see `compression.marked`: it has no bytes and no rank beside others.
    foresees: whether its eviction method must know the text beforehand, so that it is only an upper bound.
    """

    label: str
    point: Mapping[str, Any]
    num_planned: int
    trials: Sequence[Sequence[Measurement]]
    values: Mapping[str, Sequence[float]]
    samples: Mapping[str, Sequence[Hashable]] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    simulated: bool = False
    foresees: bool = False

    @property
    def name(self) -> str:
        """The row's name in the figure and in sentences."""
        parts = [self.label] * bool(self.label) + words(self.point)
        return ", ".join(parts) or "this configuration"

    def mean(self, key: str) -> float | None:
        """Returns the mean over samples; None without measurements."""
        values = self.values.get(key, ())
        return mean(values) if values else None

    def sd(self, key: str) -> float | None:
        """Returns the standard deviation over samples; None for fewer than two."""
        values = self.values.get(key, ())
        return deviation(values) if len(values) > 1 else None


def words(point: Mapping[str, Any]) -> list[str]:
    """Returns "key value" for each key of a point; a dash for null, as in the table."""
    return [f"{key.rpartition('.')[2]} {MISSING if value is None else value}" for key, value in point.items()]


def of_metric(rows: Sequence[ResultRow], metric: str) -> list[Measurement]:
    """Returns the measurements of one kind of all trials of some rows."""
    return [m for row in rows for trial in row.trials for m in trial if m["metric"] == metric]


def ranked(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Returns the rows that are compared with each other: without rows of simulated memory, unless all are."""
    return [row for row in rows if not row.simulated] or list(rows)


def extremes(rows: Sequence[ResultRow], key: str) -> list[tuple[float, ResultRow]]:
    """Returns the lowest and the highest mean of a summary key, each with its row; empty if no row has one."""
    found = [(value, row) for row in ranked(rows) if (value := row.mean(key)) is not None]
    return [choose(found, key=lambda pair: pair[0]) for choose in (min, max)] if found else []


def compilation_note(rows: Sequence[ResultRow]) -> list[str]:
    """Returns a note if something was compiled while a row was timed."""
    return ["Times of some rows include compilation."] * _any_above_0(rows, "compiled_while_timed")


def preemption_note(rows: Sequence[ResultRow], key: str) -> list[str]:
    """Returns a note if requests of a row were preempted. key: of their number in the summary."""
    return ["Some rows preempted requests because their pool was full."] * _any_above_0(rows, key)


def _any_above_0(rows: Sequence[ResultRow], key: str) -> bool:
    return any((row.mean(key) or 0) > 0 for row in rows)
