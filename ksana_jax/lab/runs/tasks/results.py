"""Rows and columns of a task's table of results. Knows numbers and their formatting, no task."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ksana_jax.lab.runs import dotted

Measurement = dict[str, Any]
MISSING = "—"
SIMULATED = " (simulated memory)"  # ends the label of a row of simulated memory


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table. key: key of the summary. write: formats a value. best: "min" or "max" is set in bold.

    exact: whether equal work gives equal values, as for counts: a deviation of 0 is not shown, and any displayed
    difference counts. Other columns are subject to noise, see `ksana_jax.lab.runs.significance`.
    change: title of a column of changes against each row's baseline, which follows this one; empty for none.
    note: explains the column below the table.
    """

    key: str
    title: str
    write: Callable[[float], str]
    best: Literal["min", "max"] | None = None
    exact: bool = False
    change: str = ""
    note: str = ""

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


def weighted_mean(values: Sequence[float], weights: Sequence[float], geometric: bool = False) -> float:
    """Returns the weighted mean, arithmetic or geometric; of perplexities weighted by tokens, the geometric one is that
    of all tokens."""
    scale = math.fsum(weights)
    if not geometric:
        return sum(w * value for value, w in zip(values, weights, strict=True)) / scale
    if min(values) <= 0:
        return 0.0
    exponent = sum(w * math.log(value) for value, w in zip(values, weights, strict=True)) / scale
    return math.inf if exponent > math.log(sys.float_info.max) else math.exp(exponent)


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of two or more values; if some are not finite, NaN, or 0 if all are equal."""
    if all(math.isfinite(value) for value in values):
        try:
            return statistics.stdev(values)
        except OverflowError:
            return math.inf
    return 0.0 if all(value == values[0] for value in values) else math.nan


class Part(NamedTuple):
    """The value of a summary key on one sample of a trial, such as a text; weight: its tokens, for instance."""

    value: float
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The sample of a trial's value that was measured on no sample that other trials share."""

    seed: int | None


@dataclasses.dataclass(frozen=True)
class ResultRow:
    """A row of the table with its results. trials: the measurements of each finished trial, one trial per seed.

    values: {summary key: its values}, one per sample; among equal samples, the first counts.
    samples: {summary key: the sample of each value}; see `Results.sample` and `Results.parts`.
    weights: {summary key: the weight of each value}, of keys that have parts. geometric: they average as logarithms.
    baseline: the row that changes are relative to; None for itself, and where there is none.
    config: settings of its trials other than the defaults, see `identity.defining`; empty without a finished trial.
    simulated: whether its memory is simulated, see `compression.marked`: it has no bytes and no rank among others.
    foresees: whether its eviction method must know the text beforehand, so that it is only an upper bound.
    """

    label: str
    point: Mapping[str, Any]
    num_planned: int
    trials: Sequence[Sequence[Measurement]]
    values: Mapping[str, Sequence[float]]
    samples: Mapping[str, Sequence[Hashable]] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    geometric: bool = False
    baseline: ResultRow | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    simulated: bool = False
    foresees: bool = False

    @property
    def name(self) -> str:
        """The row's name in the figure and in sentences."""
        outside = bool(self.label) and all(value is None for value in self.point.values())  # of the grid
        parts = [self.label] * bool(self.label) + ([] if outside else words(self.point))
        return ", ".join(parts) or "this configuration"

    def value(self, key: str) -> Any:
        """Returns the value of a key of the grid; of a row outside it, the one that its settings give, or None."""
        return self.point[key] if self.point.get(key) is not None else dotted.flat(self.config).get(key)

    def mean(self, key: str) -> float | None:
        """Returns the mean over samples, by their weights; None without measurements."""
        values = self.values.get(key, ())
        if not values or key not in self.weights:
            return mean(values) if values else None
        return weighted_mean(values, self.weights[key], self.geometric)

    def sd(self, key: str) -> float | None:
        """Returns the standard deviation over trials; None for fewer than two, and for keys that have parts: a spread
        of texts says nothing about the row."""
        values = self.values.get(key, ())
        return deviation(values) if len(values) > 1 and key not in self.weights else None


def words(point: Mapping[str, Any]) -> list[str]:
    """Returns "key value" for each key of a point; a dash for null, as in the table."""
    return [f"{key.rpartition('.')[2]} {MISSING if value is None else value}" for key, value in point.items()]


def of_metric(rows: Sequence[ResultRow], metric: str) -> list[Measurement]:
    """Returns the measurements of one kind of all trials of some rows."""
    return [m for row in rows for trial in row.trials for m in trial if m["metric"] == metric]


def ranked(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Returns the rows that are compared with each other: without rows of simulated memory, unless all are."""
    return [row for row in rows if not row.simulated] or list(rows)


def compilation_note(rows: Sequence[ResultRow]) -> list[str]:
    """Returns a note if something was compiled while a row was timed."""
    return ["Times of some rows include compilation."] * _any_above_0(rows, "compiled_while_timed")


def preemption_note(rows: Sequence[ResultRow], key: str) -> list[str]:
    """Returns a note if requests of a row were preempted. key: of their number in the summary."""
    return ["Some rows preempted requests because their pool was full."] * _any_above_0(rows, key)


def _any_above_0(rows: Sequence[ResultRow], key: str) -> bool:
    return any((row.mean(key) or 0) > 0 for row in rows)
