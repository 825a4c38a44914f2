"""Combines several runs in one table, if they measured the same samples. Knows records and reports, no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.recorded_results import RecordedResults
from ksana_jax.lab.runs.report import Report, read_report, report_of_rows
from ksana_jax.lab.runs.tasks.base import Results
from ksana_jax.lab.runs.tasks.results import ResultRow


def combine(folders: Sequence[Path], trusted: Collection[str] | None = ()) -> Report:
    """Returns a report of the rows of several folders, each row labelled with its run. trusted: see `report`.

    Raises:
      FileNotFoundError: a folder has no records.
      ConfigError: their tasks differ, or they scored different texts or positions, judged by content.
    """
    names = names_of(folders)
    reports = {name: read_report(folder, trusted) for name, folder in zip(names, folders, strict=True)}
    first = reports[names[0]]
    for name, made in reports.items():
        check_comparable(names[0], first.task, first.rows, name, made.task, made.rows)
    keys = list(dict.fromkeys(key for made in reports.values() for row in made.rows for key in row.point))
    rows, notes = [], []
    for name, made in reports.items():
        for row in made.rows:
            label = f"{name}: {row.label}" if row.label else name
            rows.append(dataclasses.replace(row, label=label, point={key: row.point.get(key) for key in keys}))
        planned, done = sum(r.num_planned for r in made.rows), sum(len(r.trials) for r in made.rows)
        if done < planned:
            notes.append(f"{done} of {planned} trials of {name} are done.")
    failed = {trial: error for made in reports.values() for trial, error in made.failed.items()}
    starts = [start for made in reports.values() for start in made.starts]
    return report_of_rows("-".join(names), ", ".join(names), first.task, rows, notes, failed, starts)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Returns the names of the folders, or their paths if two have the same name."""
    whole = [folder.resolve() for folder in folders]
    if len(set(whole)) < len(whole):
        raise ConfigError(f"a folder is named twice: {', '.join(map(str, folders))}")
    names = [folder.name for folder in whole]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def check_comparable(
    a: str, a_task: Results, a_rows: Sequence[ResultRow], b: str, b_task: Results, b_rows: Sequence[ResultRow]
) -> None:
    """Rejects runs of different tasks, and runs whose values of the same key come from different samples."""
    kinds = [task.name if isinstance(task, RecordedResults) else type(task).__name__ for task in (a_task, b_task)]
    if type(a_task) is not type(b_task) or kinds[0] != kinds[1]:
        raise ConfigError(f"{a} is of task {kinds[0]}, {b} of {kinds[1]}: they have no columns in common")
    mine, theirs = _samples(a_rows), _samples(b_rows)
    for key in mine.keys() & theirs.keys():
        if mine[key] != theirs[key]:
            raise ConfigError(
                f"{a} and {b} scored different texts or positions ({len(mine[key])} and {len(theirs[key])} draws, "
                f"{len(mine[key] & theirs[key])} in common): numbers are comparable only with the same content, "
                "tokenizer, num_texts, num_tokens, bucket_tokens and seeds"
            )


def _samples(rows: Sequence[ResultRow]) -> dict[str, set[Hashable]]:
    """Returns {summary key: all samples on which the rows measured it}."""
    found: dict[str, set[Hashable]] = {}
    for row in rows:
        for key, samples in row.samples.items():
            found.setdefault(key, set()).update(samples)
    return found
