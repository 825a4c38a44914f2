"""Says before a run what it computes, how long it takes, and which differences it can resolve."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from ksana_jax.core.errors import ConfigError, LoadError
from ksana_jax.core.plugins import trusting
from ksana_jax.core.units import byte_size
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.lab.runs import dotted
from ksana_jax.lab.runs.config import Plan, Trial
from ksana_jax.lab.runs.models import reader_notes
from ksana_jax.lab.runs.progress import duration
from ksana_jax.lab.runs.records import Records, Shard, read
from ksana_jax.lab.runs.run import own_names
from ksana_jax.lab.runs.significance import half_width
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.trials import planned_bytes
from ksana_jax.methods.eviction.window import Window

DEVICES = (2, 4, 8)  # for which the time of a run is printed


def outlook(plan: Plan, folder: Path, shard: Shard) -> list[str]:
    """Returns lines for a reader: trials and tokens, rows that run, seconds, and the differences that are resolved.

    Seconds are those of the trials that the folder has, by their tokens.
    """
    mine = shard.part_of(plan.trials)
    done = Records()
    if any(folder.glob("records*.jsonl")):
        with trusting(own_names(plan)):
            done = read(folder)
    todo = [trial for trial in mine if trial.id not in done.done]
    if not todo:
        return [f"all {len(mine)} trials are done", *_changes(plan, folder, done)]
    tokens = _tokens(todo)
    size = f", about {tokens:,} tokens" if tokens else ""
    lines = [f"{len(todo)} trial{'s' * (len(todo) > 1)}{size}"]
    if len(todo) < len(mine):
        rows = Counter(trial.label for trial in todo)
        lines[0] = f"{len(todo)} of {len(mine)} trials to run{size}; {len(mine) - len(todo)} are done"
        lines.append(f"to run: {'; '.join(f'{label} ({count})' for label, count in rows.items())}")
    lines += _changes(plan, folder, done)
    timed = [trial for trial in mine if (cost := done.costs.get(trial.id)) and cost.seconds]
    if known := tokens and _tokens(timed):
        a_token = sum(done.costs[trial.id].seconds or 0.0 for trial in timed) / known
        rows = ", ".join(dict.fromkeys(trial.label for trial in timed))
        lines.append(f"about {duration(a_token * tokens)}, at the speed of the trials that are done ({rows})")
        times = [a_token * _tokens([trial]) for trial in todo]
        if more := [count for count in DEVICES if count <= len(todo)]:
            spread = ", ".join(f"{duration(_makespan(times, count))} with {count}" for count in more)
            lines.append(f"on several devices (--on ray, --shard) about {spread}")
    elif tokens:
        lines.append("no estimate of the time until a first trial has finished in this folder")
    return [*lines, *reader_notes(trial.config for trial in todo), *_defaults(plan), *_resolution(plan)]


def _makespan(times: Sequence[float], num_devices: int) -> float:
    """Returns when the last of some trials ends if a device takes the next one as soon as it is free."""
    ends = [0.0] * num_devices
    for seconds in times:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def _changes(plan: Plan, folder: Path, done: Records) -> list[str]:
    """Returns lines on what differs from the folder's last run: another experiment, or settings of rows."""
    if done.plan is None:
        return []
    if done.plan["name"] != plan.name:
        return [
            f"{folder} has the run of {done.plan['name']!r}: its tables and figure will be replaced, its records stay"
        ]
    before = {(row["label"], str(row["point"])): row["trials"][0] for row in done.plan["rows"] if row["trials"]}
    changes: dict[str, dict[str, None]] = defaultdict(dict)
    for row in plan.rows:
        last, now = before.get((row.label, str(row.point))), row.trials[0]
        if last in done.starts and last != now.id:
            configs = (dotted.flat({**config, "seed": None}) for config in (done.starts[last]["config"], now.config))
            changes[dotted.changes_text(dotted.differing(*configs))][row.label or now.label] = None
    return [f"{', '.join(labels)}: {text}" for text, labels in changes.items() if text]


def memory(plan: Plan, shard: Shard) -> list[str]:
    """Returns a line on the largest engine of a run's trials; none where no engine computes."""
    engines = {trial.engine_key: trial for trial in shard.part_of(plan.trials)}
    if not _tokens(tuple(engines.values())):
        return []
    try:
        largest = max(planned_bytes(trial, plan.max_repositioned_sinks(trial)) for trial in engines.values())
    except (ConfigError, LoadError) as error:
        return [f"an engine cannot be made: {error}"]
    return [f"at most {byte_size(largest)} of weights and KV pool at a time"]


def _tokens(trials: Sequence[Trial]) -> int:
    """Returns about how many tokens trials compute; 0 if that is unknown."""
    counts = [task_named(trial.config["task"]).num_tokens(trial.config) for trial in trials]
    return sum(count or 0 for count in counts) if None not in counts else 0


def _defaults(plan: Plan) -> list[str]:
    """Returns a line for each setting that eviction methods leave to different defaults: tokens that always stay."""
    given = {row.label: row.trials[0].config["engine"]["kv_eviction"] for row in plan.rows}
    methods = {label: method for label, setting in given.items() if (method := read_eviction(setting)) is not None}
    lines = []
    for name in ("sinks", "recent"):
        # The newest tokens of a window stay anyway.
        read = {label: m for label, m in methods.items() if name == "sinks" or not isinstance(m, Window)}
        rows: dict[str, list[str]] = defaultdict(list)
        for label, method in read.items():
            rows[str(getattr(method, name))].append(label)
        if len(rows) > 1 and any(name not in given[label] for label in read):
            shown = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in rows.items())
            lines.append(f"rows have different {name}, some by default: {shown}")
    return lines


def _resolution(plan: Plan) -> list[str]:
    task = task_named(plan.task)
    counts = {sum(task.num_samples(trial.config) for trial in row.trials) for row in plan.rows}
    if len(plan.rows) < 2 or len(counts) != 1:
        return []
    (count,) = counts
    if count < 2:
        return [f"1 {task.samples.removesuffix('s')} per row: no difference can be resolved; give more seeds"]
    width = half_width(count) / math.sqrt(count)
    samples = f"{count} {task.samples} per row"
    return [f"{samples}: the test resolves differences above {width:.2g} times their standard deviation over these"]
