"""Compares two runs row by row with a paired test over seeds. Knows records, no engine.

A row of one run is joined with the row of the other whose trials differ from its own in the fewest settings, if each is
the only such row of the other; a run with a single row is compared with every row of the other. Values are paired by
the sample on which both were measured (`Results.sample`), otherwise by seed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ksana_jax.core.plugins import trusting
from ksana_jax.lab.runs import classes, dotted, noise
from ksana_jax.lab.runs.combine import check_comparable, names_of
from ksana_jax.lab.runs.identity import recorded_config
from ksana_jax.lab.runs.report import done_of, read_planned, result_rows, results_of, values_of
from ksana_jax.lab.runs.tasks.base import Column, ResultRow, Results
from ksana_jax.lab.runs.tasks.results import mean

Differs = dict[str, tuple[Any, Any]]  # {dotted key: (value in A, value in B)}


@dataclasses.dataclass(frozen=True)
class ComparedNumber:
    """One summary number in both rows.

    a, b: values of the pairs, in the same order; without a pair, all values of each row.
    differences: b minus a, for each pair. p: of the paired t-test that their mean is 0; None for fewer than two pairs.
    """

    a: Sequence[float]
    b: Sequence[float]
    differences: Sequence[float]

    @property
    def p(self) -> float | None:
        return noise.paired_p(self.differences)

    def better(self, column: Column) -> Literal["a", "b"] | None:
        """Returns the run that is better beyond the noise: p is below 0.05, or displayed exact counts differ."""
        if not self.differences or column.best is None:
            return None
        a, b = mean(self.a), mean(self.b)
        if math.isnan(a) or math.isnan(b) or (column.text(a) == column.text(b) and column.exact):
            return None
        if not column.exact and (self.p is None or self.p >= noise.SIGNIFICANT):
            return None
        return "a" if (a < b) == (column.best == "min") else "b"


@dataclasses.dataclass(frozen=True)
class JoinedRow:
    """A row of A and its partner in B; None without one. differs: their settings."""

    a: ResultRow | None
    b: ResultRow | None
    differs: Differs
    numbers: Mapping[str, ComparedNumber]

    @property
    def name(self) -> str:
        return " | ".join(dict.fromkeys(row.name for row in (self.a, self.b) if row is not None))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side. environment: differences of their machines, commits and versions."""

    a: str
    b: str
    title: str
    task: str
    rows: list[JoinedRow]
    columns: list[Column]
    environment: Differs
    notes: list[str]


def compare(a: Path, b: Path, trusted: Collection[str] | None = ()) -> Comparison:
    """Compares run B with run A, two folders that `ksana run` wrote. trusted: see `report`.

    Raises:
      FileNotFoundError: a folder has no records.
      ConfigError: their tasks differ, or they scored different texts or positions, judged by content.
    """
    names = names_of([a, b])
    with trusting(trusted):
        runs = [_Run.read(folder) for folder in (a, b)]
    check_comparable(names[0], runs[0].task, runs[0].rows, names[1], runs[1].task, runs[1].rows)
    joined = [_joined(runs, i, j) for i, j in _join(*(run.configs for run in runs))]
    notes = []
    for name, run in zip(names, runs, strict=True):
        if missing := [row.name for row, config in zip(run.rows, run.configs, strict=True) if config is None]:
            notes.append(f"{name} has no finished trial of: {'; '.join(missing)}.")
    notes += classes.notes(start for run in runs for start in run.starts)
    rows = [row for run in runs for row in run.rows]
    columns = [c for c in runs[0].task.columns(rows) if any(r.mean(c.key) is not None for r in rows)]
    title = " against ".join(reversed(names))
    environment = _differing(*(run.environment for run in runs))
    return Comparison(names[0], names[1], title, runs[0].name, joined, columns, environment, notes)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run. Lists have an entry per row of the plan; configs: None for a row without a finished trial."""

    name: str
    task: Results
    rows: list[ResultRow]
    configs: list[_Config | None]
    values: list[dict[str, dict[Hashable, float]]]
    environment: dict[str, Any]
    starts: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        records, plan = read_planned(folder)
        task = results_of(records, plan)
        values = [values_of(row, records, task) for row in plan["rows"]]
        firsts = [next(iter(done_of(row, records)), None) for row in plan["rows"]]
        configs = [None if first is None else _Config.of(records.starts[first]) for first in firsts]
        environments = (records.starts[first].get("environment") for first in firsts if first is not None)
        environment = dotted.flat(next(filter(None, environments), {}))
        starts = [records.starts[trial] for row in plan["rows"] for trial in done_of(row, records)]
        return cls(plan["task"], task, result_rows(records, task), configs, values, environment, starts)


@dataclasses.dataclass(frozen=True)
class _Config:
    """Settings of a row by dotted key. defining: those other than the defaults; all: with defaults."""

    defining: dict[str, Any]
    all: dict[str, Any]

    @classmethod
    def of(cls, start: Mapping[str, Any]) -> _Config:
        config = {**start["config"], "seed": None}
        return cls(dotted.flat(recorded_config({**start, "config": config})), dotted.flat(start["config"]))

    def differs(self, other: _Config) -> Differs:
        """Returns the settings that define other trials, with their values."""
        found = {}
        for key, values in _differing(self.defining, other.defining).items():
            a, b = (c.all.get(key, v) for c, v in zip((self, other), values, strict=True))
            if a != b:  # otherwise it has no effect in one of them, such as the position of no sinks
                found[key] = (a, b)
        return found


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differs:
    keys = dict.fromkeys((*a, *b))
    # As JSON, in which NaN equals itself.
    texts = {k: [json.dumps(values.get(k), sort_keys=True) for values in (a, b)] for k in keys}
    return {k: (a.get(k), b.get(k)) for k, (mine, theirs) in texts.items() if mine != theirs}


def _join(a: Sequence[_Config | None], b: Sequence[_Config | None]) -> list[tuple[int | None, int | None]]:
    """Returns pairs of indices of rows, in A's order, then B's unpaired rows; rows that are None are left out."""
    mine, theirs = ({i: config for i, config in enumerate(configs) if config is not None} for configs in (a, b))
    if min(len(mine), len(theirs)) == 1:
        return [(i, j) for i in mine for j in theirs]
    count = {(i, j): len(x.differs(y)) for i, x in mine.items() for j, y in theirs.items()}

    def nearest(pairs: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        least = min((count[pair] for pair in pairs), default=None)
        found = [pair for pair in pairs if count[pair] == least]
        return found[0] if len(found) == 1 else None

    of_b = {j: nearest([(i, j) for i in mine]) for j in theirs}
    pairs: list[tuple[int | None, int | None]] = []
    for i in mine:
        pair = nearest([(i, j) for j in theirs])
        pairs.append(pair if pair is not None and of_b[pair[1]] == pair else (i, None))
    taken = {j for _, j in pairs}
    return [*pairs, *((None, j) for j in theirs if j not in taken)]


def _joined(runs: Sequence[_Run], i: int | None, j: int | None) -> JoinedRow:
    a, b = runs
    mine, my_config = ({}, None) if i is None else (a.values[i], a.configs[i])
    theirs, their_config = ({}, None) if j is None else (b.values[j], b.configs[j])
    numbers = {key: _number(mine.get(key, {}), theirs.get(key, {})) for key in dict.fromkeys((*mine, *theirs))}
    differs = my_config.differs(their_config) if my_config and their_config else {}
    return JoinedRow(None if i is None else a.rows[i], None if j is None else b.rows[j], differs, numbers)


def _number(a: Mapping[Hashable, float], b: Mapping[Hashable, float]) -> ComparedNumber:
    if pairs := [key for key in a if key in b]:
        return ComparedNumber(
            [a[k] for k in pairs], [b[k] for k in pairs], [noise.difference(b[k], a[k]) for k in pairs]
        )
    return ComparedNumber(list(a.values()), list(b.values()), [])
