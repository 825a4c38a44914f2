"""Generates tables, a figure and a summary sentence from the records of a folder alone.

Records are data, perhaps of another user: own code that they name is imported only if the caller trusts it, and an own
task is otherwise shown by what its records say of its table.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.plugins import trusting
from ksana_jax.lab.runs import classes, dotted, figures, significance, tables
from ksana_jax.lab.runs.identity import recorded_config
from ksana_jax.lab.runs.recorded_results import RecordedResults, Summary, summary_of, table_of
from ksana_jax.lab.runs.records import Records, read, record_line
from ksana_jax.lab.runs.tasks import results_named
from ksana_jax.lab.runs.tasks.base import Column, ResultRow, Results
from ksana_jax.lab.runs.tasks.compression import full_row, is_compressed, marked, simulated_note
from ksana_jax.lab.runs.tasks.results import Part, Repeat

FIGURE_INCHES = 3.9


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of one or more folders. failed: {trial id: error}. caption: the notes on what the table shows."""

    name: str
    title: str
    task: Results
    rows: list[ResultRow]
    columns: list[Column]
    notes: list[str]
    conclusion: str
    failed: dict[str, str]
    starts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pivot: str = ""
    caption: list[str] = dataclasses.field(default_factory=list)

    @property
    def grid(self) -> tables.Grid:
        """The table as text."""
        if self.pivot and (headline := self.task.headline(self.rows)) is not None:
            return tables.pivoted(self.rows, headline, self.pivot)
        return tables.grid(self.rows, self.columns)

    @property
    def markdown(self) -> str:
        """The table and what stands below it."""
        notes = [self.conclusion, *self.notes] if self.conclusion else self.notes
        return tables.markdown(self.title, *self.grid, notes)


def report(folder: Path, trusted: Collection[str] | None = ()) -> Report:
    """Writes table.md, table.csv and table.tex, then figure.png and figure.pdf; equal records give equal bytes.

    Args:
      trusted: names "package.module:name" of own code that may be imported; None: all that the records name.

    Raises:
      FileNotFoundError: the folder has no records.
      ConfigError: the records contain no plan, are not valid records, or belong to another task than the plan's.
    """
    made = read_report(folder, trusted)
    write_tables(made, folder)
    draw(made, folder)
    return made


def read_report(folder: Path, trusted: Collection[str] | None = ()) -> Report:
    """Returns the report of a folder's records; writes nothing. trusted: see `report`."""
    with trusting(trusted):
        records, plan = read_planned(folder)
        task = results_of(records, plan)
        rows = result_rows(records, task)
    starts = [records.starts[trial] for row in plan["rows"] for trial in done_of(row, records)]
    notes = _progress_note(rows, plan, records.failed)
    notes += _machine_notes(records, rows) if task.measures_speed else []
    pivot = plan.get("pivot", "")
    return report_of_rows(plan["name"], plan["title"], task, rows, notes, records.failed, starts, pivot)


def results_of(records: Records, plan: Mapping[str, Any]) -> Results:
    """Returns the reader of a plan's measurements: its task, or what the records say of it.

    Raises:
      ConfigError: there is no such task, or it is not trusted, and the records do not have its numbers.
    """
    try:
        return results_named(plan["task"])
    except ConfigError as error:
        if not records.summaries and records.done:
            raise ConfigError(f"{error}; these records have no table of their own") from error
    table = records.table if records.table and records.table["task"] == plan["task"] else None
    try:
        return RecordedResults(plan["task"], table)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(f"the records' table of task {plan['task']!r} cannot be read: {error}") from error


def read_planned(folder: Path) -> tuple[Records, dict[str, Any]]:
    """Returns the records of a folder, and the last plan among them.

    Raises:
      FileNotFoundError: the folder has no records.
      ConfigError: the records contain no plan, or are not valid records.
    """
    records = read(folder)
    if records.plan is None:
        raise ConfigError(f"{folder}: the records name no experiment")
    return records, records.plan


def report_of_rows(
    name: str,
    title: str,
    task: Results,
    rows: list[ResultRow],
    notes: list[str],
    failed: dict[str, str],
    starts: list[dict[str, Any]],
    pivot: str = "",
) -> Report:
    """Returns the report of rows, with the given notes followed by those on the numbers and on versions.

    Args:
      starts: start records of all trials. pivot: see `Experiment`; without effect where no row has a value of it.
    """
    try:
        columns, of_task, conclusion = task.columns(rows), task.notes(rows), task.conclusion(rows)
        pivot = pivot if any(row.point.get(pivot) is not None for row in rows) else ""
        headline = task.headline(rows) if pivot else None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name}: task {type(task).__name__} cannot show these measurements: {why}") from error
    of_trials = dict.fromkeys(str(note) for start in starts for note in start.get("notes", ()))
    made = Report(name, title or name, task, rows, columns, [], conclusion, failed, starts, pivot)
    shown = columns if headline is None else [headline]
    said = [
        *notes,
        *_input_note(starts),
        *of_trials,
        *of_task,
        *(c.note for c in shown if c.note),
        *simulated_note(rows),
    ]
    if headline is not None and not significance.shows_changes(rows, headline):
        shown = [dataclasses.replace(headline, change="")]
        said.append(f"Cells: {headline.title}.")
    made.caption.extend([*said, *significance.notes(rows, shown, task.samples, any(map(any, made.grid.bold)))])
    made.notes.extend([*made.caption, *classes.notes(starts)])
    return made


def _input_note(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names the model, if it is one, and the texts of all trials."""
    configs = [start["config"] for start in starts if isinstance(start.get("config"), dict)]
    models = {str(config["model"]) for config in configs if config.get("model")}
    texts = {Path(str(text)).name for c in configs for text in (c.get("settings") or {}).get("texts") or ()}
    said = [f"Model: {Path(model).name}." for model in models if len(models) == 1]
    said += [f"Texts: {', '.join(sorted(texts))}."] if 0 < len(texts) < 5 else []
    return [" ".join(said)] if said else []


def write_tables(made: Report, folder: Path) -> list[str]:
    """Writes table.md, table.csv and table.tex; returns these names."""
    files = {
        "table.md": made.markdown,
        "table.csv": tables.comma_separated(made.rows, made.columns),
        "table.tex": tables.latex(made.title, made.grid, made.caption, made.name, kind_of(made.rows)),
    }
    for name, content in files.items():
        write_atomic(folder / name, content)
    return list(files)


_KINDS = {"engine.kv_eviction": "method", "engine.kv_selection": "method", "engine.kv_cache_dtype": "codec"}
_KINDS |= {"pattern": "pattern", "layer_patterns": "pattern", "model": "model"}


def kind_of(rows: Sequence[ResultRow]) -> str:
    """Returns what the rows of a table are, by the first setting in which they differ."""
    configs = [row.config for row in rows if row.config]
    differ = (kind for key, kind in _KINDS.items() if len({repr(dotted.at(config, key)) for config in configs}) > 1)
    return next(differ, "variant")


def draw(made: Report, folder: Path) -> list[str]:
    """Draws figure.png and figure.pdf; returns these names. A failure gives a warning and removes an older figure."""
    try:
        files = figures.render(lambda figure: made.task.draw(figure, made.rows), FIGURE_INCHES)
    except Exception as error:
        # An old figure with other numbers must not remain next to the new table.
        for kind in figures.KINDS:
            (folder / f"figure.{kind}").unlink(missing_ok=True)
        warnings.warn(f"figure not drawn: {type(error).__name__}: {' '.join(str(error).split())}", stacklevel=2)
        return []
    for kind, content in files.items():
        write_atomic(folder / f"figure.{kind}", content)
    return [f"figure.{kind}" for kind in files]


def result_rows(records: Records, task: Results) -> list[ResultRow]:
    """Returns the plan's rows with the measurements so far."""
    assert records.plan is not None
    rows = []
    for row in records.plan["rows"]:
        done = done_of(row, records)
        values, pooled = values_of(row, records, task)
        made = ResultRow(
            row["label"],
            row["point"],
            len(row["trials"]),
            [records.done[trial] for trial in done],
            values={key: [part.value for part in found.values()] for key, found in values.items()},
            samples={key: list(found) for key, found in values.items()},
            weights={key: [part.weight for part in values[key].values()] for key in pooled},
            geometric=task.geometric,
            config=recorded_config(records.starts[done[0]]) if done else {},
        )
        rows.append(marked(made, records.starts[done[0]]) if done else made)
    return with_baselines(rows, records.plan.get("baseline", ""))


def with_baselines(rows: Sequence[ResultRow], name: str = "") -> list[ResultRow]:
    """Returns rows with their baselines: the row of that label, at the same point if the grid has it there, or else the
    row with the full cache."""
    named = [row for row in rows if row.label == name] if name else []

    def baseline(row: ResultRow) -> ResultRow | None:
        if not named:
            return full_row(row, rows) if is_compressed(row) else None
        found = next((base for base in named if base.point == row.point), named[0])
        return None if found is row else found

    return [row if row.baseline else dataclasses.replace(row, baseline=baseline(row)) for row in rows]


def records_text(records: Records, task: Results) -> str:
    """Returns the text of a records file of trials that are done, with a plan."""
    assert records.plan is not None
    lines = [record_line("plan", **records.plan)]
    for trial, start in records.starts.items():
        measurements = records.done[trial]
        lines.append(record_line("start", **start))
        lines += [record_line("measurement", trial=trial, **m) for m in measurements]
        summary = summary_of(task, measurements)
        lines.append(record_line("done", trial=trial, num_measurements=len(measurements), **summary))
    table = table_of(task, result_rows(records, task))
    return "".join([*lines, record_line("table", task=records.plan["task"], **table)])


def done_of(row: Mapping[str, Any], records: Records) -> list[str]:
    """Returns the finished trials of a row of the plan."""
    return [trial for trial in row["trials"] if trial in records.done]


def values_of(
    row: Mapping[str, Any], records: Records, task: Results
) -> tuple[dict[str, dict[Hashable, Part]], set[str]]:
    """Returns the numbers of a row of the plan by summary key and sample, of equal samples the first one's; and the
    keys that have parts."""
    assert records.plan is not None
    values: dict[str, dict[Hashable, Part]] = defaultdict(dict)
    pooled: set[str] = set()
    for trial in done_of(row, records):
        found = summary(task, records.plan["task"], trial, records)
        pooled |= found.parts.keys()
        for key, value in found.numbers.items():
            whole = found.samples.get(key, Repeat(records.starts[trial].get("seed")))
            for sample, part in found.parts.get(key, {whole: Part(value)}).items():
                values[key].setdefault(sample, part)
    return values, pooled


def summary(task: Results, name: str, trial: str, records: Records) -> Summary:
    """Returns the numbers of a trial."""
    measurements = records.done[trial]
    try:
        recorded = isinstance(task, RecordedResults)
        found = Summary.read(records.summaries[trial]) if recorded else Summary.of(task, measurements)
        found.check()
        return found
    except Exception as error:
        # Measurements come from a file; if a task cannot read them, it did not write them.
        raise ConfigError(
            f"the measurements of trial {trial} are not those of task {name!r}: {type(error).__name__}: {error}; "
            "delete its `done` line in the records, and `ksana run` measures it again"
        ) from error


def _progress_note(rows: list[ResultRow], plan: Mapping[str, Any], failed: Mapping[str, str]) -> list[str]:
    planned, done = sum(r.num_planned for r in rows), sum(len(r.trials) for r in rows)
    errors = [failed[trial] for row in plan["rows"] for trial in row["trials"] if trial in failed]
    said = f"; {len(errors)} failed, the first with {errors[0]}" if errors else ""
    return [f"{done} of {planned} trials are done{said}."] if done < planned else []


def _machine_notes(records: Records, rows: list[ResultRow]) -> list[str]:
    """Returns caveats on times and speeds: concurrent trials, or different kinds of machines."""
    if not any(key.endswith("_s") or "_per_s" in key for row in rows for key in row.values):
        return []
    notes = []
    if records.num_at_once > 1:
        notes.append(
            f"Up to {records.num_at_once} trials shared one machine at the same time, which affects times and speeds."
        )
    planned = {trial for row in (records.plan or {"rows": []})["rows"] for trial in row["trials"]}
    costs = [records.costs[trial] for trial in planned & records.costs.keys()]
    if loads := [(cost.load, cost.seconds) for cost in costs if cost.load is not None and cost.seconds]:
        mean = sum(load * seconds for load, seconds in loads) / sum(seconds for _, seconds in loads)
        notes.append(
            f"Other programs took {mean:.0%} of the processors' time meanwhile, {max(loads)[0]:.0%} in the worst trial."
        )
    starts = [start.get("environment") for trial, start in records.starts.items() if trial in planned]
    kinds = dict.fromkeys(
        (e.get("device"), e.get("cpu"), e.get("cores")) for e in starts if isinstance(e, dict) and "cpu" in e
    )
    if len(kinds) > 1:
        named = "; ".join(f"{device}, {cpu}, {cores} cores" for device, cpu, cores in kinds)
        notes.append(f"The trials ran on {len(kinds)} kinds of machines, whose times and speeds differ: {named}.")
    return notes
