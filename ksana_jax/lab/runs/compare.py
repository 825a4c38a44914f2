"""Compares two runs row by row, or rows of one run with one of them, by the test of `significance`. Knows records, no
engine.

A row of one run is joined with the row of the other whose trials differ from its own in the fewest settings, if each is
the only such row of the other; a run with a single row is compared with every row of the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.plugins import nearest, trusting
from ksana_jax.lab.runs import classes, dotted
from ksana_jax.lab.runs.combine import check_comparable, names_of
from ksana_jax.lab.runs.identity import recorded_config
from ksana_jax.lab.runs.report import done_of, read_planned, result_rows, results_of
from ksana_jax.lab.runs.significance import Change, change
from ksana_jax.lab.runs.tasks.base import Column, ResultRow, Results
from ksana_jax.lab.runs.tasks.compression import facts_of

Differs = dict[str, tuple[Any, Any]]  # {dotted key: (value in A, value in B)}


@dataclasses.dataclass(frozen=True)
class JoinedRow:
    """A row of A and its partner in B; None without one. differs: their settings, defaults of methods included."""

    a: ResultRow | None
    b: ResultRow | None
    differs: Differs
    name: str

    def change(self, key: str) -> Change | None:
        """Returns the change of a number from A to B; None without a pair."""
        return None if self.a is None or self.b is None else change(self.b, self.a, key)


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
    columns = _measured_columns(runs[0].task, rows)
    title = " against ".join(reversed(names))
    environment = dotted.differing(*(run.environment for run in runs))
    return Comparison(names[0], names[1], title, runs[0].name, joined, columns, environment, notes)


def compare_rows(
    folder: Path, against: str, names: Sequence[str] = (), trusted: Collection[str] | None = ()
) -> Comparison:
    """Compares rows of one run with the row `against`. Of several rows, the comparison has the headline alone.

    Args:
      against: name of a row, or label of a variant: of its rows, the one at the same point of the grid or, for a row
        outside the grid, each. names: of the rows; none for all. trusted: see `report`.

    Raises:
      FileNotFoundError: the folder has no records.
      ConfigError: the run has no row of such a name with a finished trial.
    """
    with trusting(trusted):
        run = _Run.read(folder)
    bases = _places(run, against)
    found = [i for name in names for i in _places(run, name)] if names else _places(run, None)
    joined = []
    for j in (i for i in found if i not in bases):
        same = [i for i in bases if run.rows[i].point == run.rows[j].point] or bases
        joined += [_joined((run, run), i, j, named_both=len(same) > 1) for i in same]
    columns = _measured_columns(run.task, run.rows)
    if len(joined) > 1 and (headline := run.task.headline(run.rows)) is not None:
        columns = [column for column in columns if column.key == headline.key]
    title = f"{', '.join(names) or 'Each row'} against {against}"
    b = names[0] if len(names) == 1 else "this row"
    return Comparison(against, b, title, run.name, joined, columns, {}, classes.notes(run.starts))


def _places(run: _Run, name: str | None) -> list[int]:
    """Returns the places of the finished rows of a name or label; None: of all."""
    known = {i: (row.name, row.label) for i, row in enumerate(run.rows) if run.configs[i] is not None}
    found = [i for i, names in known.items() if name is None or name in names]
    if not found:
        names = dict.fromkeys(name for both in known.values() for name in both if name)
        raise ConfigError(f"no finished row {name!r}, the nearest is {nearest(str(name), [*names], cutoff=0.0)!r}")
    return found


def _measured_columns(task: Results, rows: Sequence[ResultRow]) -> list[Column]:
    return [c for c in task.columns(rows) if any(r.mean(c.key) is not None for r in rows)]


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run. Lists have an entry per row of the plan; configs: None for a row without a finished trial."""

    name: str
    task: Results
    rows: list[ResultRow]
    configs: list[_Config | None]
    environment: dict[str, Any]
    starts: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        records, plan = read_planned(folder)
        task = results_of(records, plan)
        firsts = [next(iter(done_of(row, records)), None) for row in plan["rows"]]
        configs = [None if first is None else _Config.of(records.starts[first]) for first in firsts]
        environments = (records.starts[first].get("environment") for first in firsts if first is not None)
        environment = dotted.flat(next(filter(None, environments), {}))
        starts = [records.starts[trial] for row in plan["rows"] for trial in done_of(row, records)]
        return cls(plan["task"], task, result_rows(records, task), configs, environment, starts)


_METHOD = "engine.kv_eviction."


@dataclasses.dataclass(frozen=True)
class _Config:
    """Settings of a row by dotted key. defining: those other than the defaults; all: with defaults, also of its
    eviction method."""

    defining: dict[str, Any]
    all: dict[str, Any]

    @classmethod
    def of(cls, start: Mapping[str, Any]) -> _Config:
        config = {**start["config"], "seed": None}
        settings = {**facts_of(config), **start}.get("eviction", {})
        method = {f"{_METHOD}{key}": value for key, value in settings.items()}
        defining = dotted.flat(recorded_config({**start, "config": config}))
        return cls(defining, {**method, **dotted.flat(start["config"])})

    def differs(self, other: _Config) -> Differs:
        """Returns the settings that define other trials, and those that two methods share, with their values."""
        keys = [key for key in self.all if key.startswith(_METHOD) and key in other.all]
        keys = dict.fromkeys([*keys, *dotted.differing(self.defining, other.defining)])
        both = {key: tuple(c.all.get(key, c.defining.get(key)) for c in (self, other)) for key in keys}
        # Others have no effect in one of them, such as the position of no sinks.
        return {key: (a, b) for key, (a, b) in both.items() if a != b}


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


def _joined(runs: Sequence[_Run], i: int | None, j: int | None, named_both: bool = True) -> JoinedRow:
    a, b = (
        (None, None) if at is None else (run.rows[at], run.configs[at]) for run, at in zip(runs, (i, j), strict=True)
    )
    name = " | ".join(dict.fromkeys(row.name for row in (a[0] if named_both else None, b[0]) if row is not None))
    return JoinedRow(a[0], b[0], a[1].differs(b[1]) if a[1] and b[1] else {}, name)
