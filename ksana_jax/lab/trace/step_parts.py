"""Time by part of the network in each kind of step: a table with intervals, and the comparison of two traces."""

from __future__ import annotations

import bisect
import collections
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.files import write_atomic
from ksana_jax.lab.recording import Event, Recording
from ksana_jax.lab.runs import tables
from ksana_jax.lab.runs.combine import names_of
from ksana_jax.lab.runs.compare import Comparison, JoinedRow
from ksana_jax.lab.runs.significance import PER_CENT, paired_t
from ksana_jax.lab.runs.tables import Grid
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, milliseconds
from ksana_jax.lab.trace.differences import other_settings
from ksana_jax.lab.trace.parts import OTHER, PARTS, Operation
from ksana_jax.lab.trace.steps import StepTrace

TITLE, ALL = "Time by part of the network", "all parts"
_write = milliseconds(3)
# Fields of a step that determine what it computes, whichever implementation does.
_WORK = ("step", "num_tokens", "num_decodes", "num_chunks", "num_draft_tokens", "num_attended", "num_sampled")


def divide(
    ran: Iterable[tuple[Operation, str, float]],
    calls: Mapping[int, Sequence[StepTrace]],
    starts: Mapping[int, float],
) -> None:
    """Gives steps the seconds of their parts (`StepTrace.parts`), to steps of one call equal ones.

    Args:
      ran: operations, their parts and their own seconds. calls: see `Profiler`.
      starts: nanosecond at which each call began; none begins while the device works on another.
    """
    order = sorted(starts, key=lambda call: starts[call])
    begins = [starts[call] for call in order]
    seconds: dict[int, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for operation, part, own_s in ran:
        if at := bisect.bisect_right(begins, operation.start_ns):
            seconds[order[at - 1]][part] += own_s
    for call, steps in calls.items():
        for step in steps:
            step.parts = {part: s / len(steps) for part, s in seconds[call].items()}


def by_kind(steps: Iterable[Event]) -> dict[str, ResultRow]:
    """Returns the seconds of the parts of steps that have them, by kind of step; the samples are what steps compute."""
    found: dict[str, Any] = {}
    for step in steps:
        if parts := step.get("parts"):
            kind = "prefill" if step["num_chunks"] else "verification" if step["num_draft_tokens"] else "decode"
            kind += " and decode" * bool(step["num_chunks"] and step["num_decodes"])
            found.setdefault(kind, {})[tuple(step[name] for name in _WORK)] = parts | {ALL: sum(parts.values())}
    rows = {}
    for kind, some in found.items():
        values = {part: [seconds.get(part, 0.0) for seconds in some.values()] for part in (*PARTS, OTHER, ALL)}
        values = {part: seconds for part, seconds in values.items() if any(seconds)}
        rows[kind] = ResultRow(kind, {}, 1, [[]], values, {part: list(some) for part in values})
    return rows


def _parts(rows: Iterable[ResultRow]) -> list[str]:
    seen = {part for row in rows for part in row.values}
    return [part for part in (*PARTS, OTHER, ALL) if part in seen]


def table(steps: Iterable[Event]) -> Grid:
    """Returns the mean milliseconds of each part in each kind of step, with their intervals; no lines without parts."""
    rows = by_kind(steps)
    cells = [[part, *(_mean(row.values.get(part, [0.0])) for row in rows.values())] for part in _parts(rows.values())]
    heads = ["part", *(f"{kind}, ms ({len(row.values[ALL])})" for kind, row in rows.items())]
    return Grid(heads, cells, [[False] * len(heads)] * len(cells), len(heads) - 1)


def _mean(seconds: Sequence[float]) -> str:
    numbers = [_write(x) for x in (statistics.fmean(seconds), *paired_t(seconds)[1:3]) if x is not None]
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def write(folder: Path, made: Grid, trace: Mapping[str, Any]) -> None:
    """Writes `table` as parts.tex. trace: content of trace.json."""
    said = f"Operations under jax's profiler: means over the steps in parentheses, with {PER_CENT} % intervals; "
    write_atomic(folder / "parts.tex", tables.latex(TITLE, made, [said + circumstances(trace)], "parts"))


def circumstances(trace: Mapping[str, Any]) -> str:
    """Returns commit, versions, processor and load of the content of a trace.json, in a line."""
    found, load = trace["environment"], trace["load"]
    commit = "unknown" if found["commit"] is None else f"{found['commit'][:12]}{', changed' * bool(found['dirty'])}"
    versions = ", ".join(f"{name} {found['packages'][name]}" for name in ("ksana-jax", "jax"))
    busy = "an unknown share" if load is None else f"{load:.0%}"
    return (
        f"commit {commit}; {versions}, Python {found['python']}; {found['device']}, {found['cpu']} "
        f"({found['instructions']}); other programs used {busy} of {found['cores']} cores."
    )


def comparison(a: Recording, b: Recording) -> Comparison:
    """Compares the parts of two traces, kind by kind, over the profiled steps that compute the same."""
    mine, theirs, differs = by_kind(a.steps), by_kind(b.steps), other_settings(a, b)
    folders = [side.path.parents[1] for side in (a, b)]
    names = names_of(folders)
    joined = [JoinedRow(mine.get(kind), theirs.get(kind), differs, kind) for kind in dict.fromkeys([*mine, *theirs])]
    columns = [Column(part, f"{part}, ms", _write, "min") for part in _parts([*mine.values(), *theirs.values()])]
    said = ["Intervals and p are over steps of one process each; other processes may differ more."]
    for name, folder in zip(names, folders, strict=True):
        said.append(f"{name}: {circumstances(json.loads((folder / 'trace.json').read_text('utf-8')))}")
    title = f"{TITLE}: {names[1]} against {names[0]}"
    return Comparison(names[0], names[1], title, "trace", joined, columns, {}, said)
