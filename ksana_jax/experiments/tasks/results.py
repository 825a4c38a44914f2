"""A task's results as rows and columns of a table. Knows numbers and how they are written, no task."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

Measurement = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table. key: of the summary; write: a value as text; best: which value is set in bold.

    exact: the same work gives the same value, a count: it is written without a deviation of 0, and any difference that
    can be read counts. Other columns are subject to noise, see `ksana_jax.experiments.noise`.
    """

    key: str
    title: str
    write: Callable[[float], str]
    best: Literal["min", "max"] | None = None
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class ResultRow:
    """A row of the table with its results. trials: the measurements of each finished trial, one trial a seed.

    values: {summary key: its values}, one for each sample: of trials that measured the same one the first counts.
    samples: {summary key: what each value was measured on}; see `BaseTask.sample`.
    """

    label: str
    point: Mapping[str, Any]
    num_planned: int
    trials: Sequence[Sequence[Measurement]]
    values: Mapping[str, Sequence[float]]
    samples: Mapping[str, Sequence[Hashable]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the figure and the sentence call the row."""
        parts = [self.label] * bool(self.label) + [f"{k.rpartition('.')[2]} {v}" for k, v in self.point.items()]
        return ", ".join(parts) or "this configuration"

    def mean(self, key: str) -> float | None:
        """Mean over samples; None where nothing was measured."""
        values = self.values.get(key, ())
        return statistics.fmean(values) if values else None

    def sd(self, key: str) -> float | None:
        """Standard deviation over samples; None below two."""
        values = self.values.get(key, ())
        return statistics.stdev(values) if len(values) > 1 else None
