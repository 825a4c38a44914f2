"""Writes and reads the records of a run: append-only JSON lines, one per measurement, flushed at once. No jax.

Kinds of line, each with "schema_version" and "kind":

  plan         name, title, task and rows of the experiment; written whenever it differs from the last one
  start        a trial begins: its id, label, seed, resolved config, notes and environment (commit, versions, device)
  measurement  one number or curve of the trial that began last
  done         the trial is complete, with num_measurements lines; without it, the lines of a trial are ignored.
               summary, samples, parts: its numbers by key, and on which samples they were measured; see `Results`
  failed       the trial raised an exception; "error" holds its text
  table        columns, notes and sentence of the table, for readers without the task's code; see `recorded_results`

The last plan of a file counts; of several files, the plan with the highest "number". Clocks decide nothing.

Numbers may be infinite or NaN, see `plain_json`.

Reading tolerates irregularities that leave the results unambiguous: a `start` without an end (a run was killed), a
second `done` or `failed` (the first `done` of a trial counts), a `failed` without a `start`. Anything else is rejected
with its line: a measurement or a first `done` outside a `start` (of which attempt?), a count that differs (lines were
lost or duplicated), a field that is missing or of another type. To have `ksana run` measure such a trial again, delete
its `done` line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import open_to_update, read_bytes
from ksana_jax.core.folder_lock import FolderInUse, FolderLock
from ksana_jax.lab.runs import plain_json
from ksana_jax.lab.runs.identity import recorded_id

SCHEMA_VERSION = 1
SLURM = "slurm"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, counted from 1: the trials whose index in the plan is index - 1 modulo count."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads "k/n", or "slurm": this task's place in a Slurm job array, whatever number its first task has.

        Raises:
          ConfigError: it is not two integers with 1 <= k <= n, or the array skips numbers.
        """
        if text == SLURM:
            return cls._of_slurm()
        k, _, n = text.partition("/")
        if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
            raise ConfigError(f"shard {text!r} is not k/n with 1 <= k <= n, for instance 1/4, nor slurm")
        return cls(int(k), int(n))

    @classmethod
    def _of_slurm(cls) -> Shard:
        try:
            this, first, last, count = (
                int(os.environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "MAX", "COUNT")
            )
        except KeyError as error:
            raise ConfigError(f"shard is slurm, and this is no task of a Slurm job array: {error} is not set") from None
        if last - first + 1 != count:
            raise ConfigError(f"shard is slurm, and the job array has {count} tasks from {first} to {last}; give k/n")
        return cls(this - first + 1, count)

    def part_of(self, trials: Sequence[T]) -> list[T]:
        """Returns the trials of this part."""
        return [trial for i, trial in enumerate(trials) if i % self.count == self.index - 1]

    @property
    def suffix(self) -> str:
        """Suffix of this shard's file names; empty if there is only one shard."""
        return "" if self.count == 1 else f".{self.index}-of-{self.count}"


WHOLE = Shard()


class Cost(NamedTuple):
    """Seconds of a trial, and the share of the processors' time that other programs took; None if not recorded."""

    seconds: float | None
    load: float | None


@dataclasses.dataclass
class Records:
    """The records of an output folder, by current trial ids; see `identity`.

    plan: the last one written. done: {trial id: its measurements}, finished trials only. starts: {trial id: the start
    record of those measurements}. summaries: {trial id: its `done` record}, of trials whose records have their numbers.
    failed: {trial id: error} of trials whose last attempt failed. table: the one of the most trials.
    costs: {trial id: what it took}.
    num_at_once: maximum number of trials that ran on one machine at the same time, according to the records.
    """

    plan: dict[str, Any] | None = None
    done: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    starts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    summaries: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    table: dict[str, Any] | None = None
    num_at_once: int = 1
    costs: dict[str, Cost] = dataclasses.field(default_factory=dict)


def read(folder: Path) -> Records:
    """Reads all records of a folder, from all its shards.

    Raises:
      FileNotFoundError: the folder has none.
      ConfigError: a line is not a record, or is out of place; names file and line. See the module's docstring.
    """
    files = sorted(folder.glob("records*.jsonl"))
    if not files:
        why = "no records.jsonl here; `ksana run` writes one" if folder.exists() else "there is no such folder"
        raise FileNotFoundError(f"{folder}: {why}")
    records, ids = Records(), {}
    running = [_read_file(path, records, ids) for path in files]
    records.num_at_once = _most_at_once([span for spans in running for span in spans])
    if records.plan is not None:
        rows = [{**row, "trials": [ids.get(t, t) for t in row["trials"]]} for row in records.plan["rows"]]
        records.plan = {**records.plan, "rows": rows}
    return records


_Span = tuple[str, float, float]  # machine, and when a trial began and ended on it


def _most_at_once(spans: list[_Span]) -> int:
    """Returns the maximum number of overlapping spans on one machine."""
    most = 1
    for machine in {span[0] for span in spans}:
        # Spans that touch do not overlap, because -1 sorts first.
        events = [(t, step) for m, begin, end in spans if m == machine for t, step in ((begin, 1), (end, -1))]
        most = max([most, *itertools.accumulate(step for _, step in sorted(events))])
    return most


def _span(start: dict[str, Any], done: dict[str, Any]) -> list[_Span]:
    environment = start.get("environment")
    machine = environment.get("machine") if isinstance(environment, dict) else None
    times = [record.get("time") for record in (start, done)]
    if not isinstance(machine, str) or not all(isinstance(t, _NUMBER) for t in times):
        return []
    return [(machine, *times)]  # pyright: ignore[reportReturnType]


def _read_file(path: Path, records: Records, ids: dict[str, str]) -> list[_Span]:
    """Adds a file's records, and adds the trials that it starts to ids: {id in the file: current id}."""
    opened: dict[str, list[dict[str, Any]]] = {}
    starts: dict[str, dict[str, Any]] = {}
    spans: list[_Span] = []
    plan = None
    for where, record in _lines(path):
        kind, trial = record["kind"], record.get("trial", "")
        if kind == "plan":
            plan = record
        elif kind == "start":
            opened[trial] = []
            ids[trial] = recorded_id(record)
            starts[trial] = record
        elif kind == "measurement":
            if trial not in opened:
                raise ConfigError(f"{where} measures trial {trial}, which is not running there: no start before it")
            opened[trial].append(record)
        elif kind == "done":
            if trial in opened:
                measured = opened.pop(trial)
                _check_count(where, record, len(measured))
                spans += _span(starts[trial], record)
                records.costs.setdefault(ids[trial], Cost(record.get("seconds"), record.get("load")))
                records.done.setdefault(ids[trial], measured)
                records.starts.setdefault(ids[trial], starts[trial])
                if "summary" in record:
                    records.summaries.setdefault(ids[trial], record)
                records.failed.pop(ids[trial], None)
            elif ids.get(trial) not in records.done:
                raise ConfigError(f"{where} ends trial {trial}, which is not running there: no start before it")
        elif kind == "failed":
            opened.pop(trial, None)
            known = ids[trial] if trial in ids else trial
            if known not in records.done:
                records.failed[known] = record["error"]
        elif records.table is None or record["num_trials"] >= records.table["num_trials"]:
            records.table = record
    if plan is not None and (records.plan is None or plan.get("number", 0) >= records.plan.get("number", 0)):
        records.plan = plan
    return spans


def _check_count(where: str, done: dict[str, Any], count: int) -> None:
    if done.get("num_measurements", count) != count:
        raise ConfigError(
            f"{where} ends trial {done['trial']} after {done['num_measurements']} measurements, the file has {count} "
            "of it; without this line `ksana run` measures the trial again"
        )


_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "plan": {"name": str, "title": str, "task": str, "rows": list, "time": _NUMBER},
    "start": {"trial": str},
    "measurement": {"trial": str, "metric": str},
    "done": {"trial": str},
    "failed": {"trial": str, "error": str},
    "table": {"task": str, "columns": list, "num_trials": int},
}
_OPTIONAL_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "plan": {"number": int, "baseline": str, "pivot": str},
    "start": {"notes": list},
    "done": {
        "num_measurements": int,
        "seconds": _NUMBER,
        "load": (*_NUMBER, type(None)),
        "summary": dict,
        "samples": dict,
        "parts": dict,
    },
}
_ROW_FIELDS: dict[str, type | tuple[type, ...]] = {"label": str, "point": dict, "trials": list}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("FILE line N", record) for each line, with kind and field types checked."""
    for number, line in enumerate(read_bytes(path).splitlines(keepends=True), start=1):
        where = f"{path} line {number}"
        if not line.endswith(b"\n"):
            # A run was killed within this line, or is writing it now.
            warnings.warn(f"{path}: the last line is incomplete and ignored ({len(line)} bytes)", stacklevel=4)
            return
        try:
            record = plain_json.loads(line)
            version = record["schema_version"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{where} is not a record: {line[:60]!r}") from error
        if version != SCHEMA_VERSION:
            raise ConfigError(f"{where} has schema_version {version!r:.20}, this version reads {SCHEMA_VERSION}")
        _check_fields(where, record)
        yield where, record


def _check_fields(where: str, record: dict[str, Any]) -> None:
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ConfigError(f"{where} is of kind {kind!r:.20}, must be one of {', '.join(_FIELDS)}")
    optional = {name: types for name, types in _OPTIONAL_FIELDS.get(kind, {}).items() if name in record}
    _check_types(f"{where}, a {kind} line", record, _FIELDS[kind] | optional)
    if kind == "plan":
        for row in record["rows"]:
            _check_types(f"{where}, a row of the plan", row, _ROW_FIELDS)
            if not all(isinstance(trial, str) for trial in row["trials"]):
                raise ConfigError(f"{where}, a row of the plan: trials is {row['trials']!r:.60}, must be a list of ids")
            if row["point"].keys() != record["rows"][0]["point"].keys():
                raise ConfigError(f"{where}: the rows of the plan have different points")


def _check_types(what: str, values: Any, fields: dict[str, type | tuple[type, ...]]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: {values!r:.60} is not an object")
    for name, wanted in fields.items():
        if name not in values:
            raise ConfigError(f"{what}: it has no {name!r}")
        if not isinstance(values[name], wanted):
            raise ConfigError(f"{what}: {name!r} is {values[name]!r:.60}")


def record_line(kind: str, **fields: Any) -> str:
    """Returns one record as a line of a records file."""
    return plain_json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, **fields}) + "\n"


class RecordFile:
    """Appends records to one file. Opening it removes an incomplete last line, with a warning.

    Raises:
      ConfigError: a link, a FIFO or the like has this name.
    """

    def __init__(self, path: Path):
        self._file: IO[bytes] = open(open_to_update(path, os.O_APPEND), "a+b")
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            warnings.warn(f"{path}: removed an incomplete last line ({len(content) - whole} bytes)", stacklevel=2)
            self._file.truncate(whole)

    def append(self, kind: str, **fields: Any) -> None:
        """Writes and flushes one record, so that killing this process cannot lose it."""
        self._file.write(record_line(kind, **fields).encode())
        self._file.flush()
        if kind == "done":
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def locked(folder: Path, shard: Shard) -> Iterator[None]:
    """Locks a folder for one run; different shards share it. The kernel releases the lock when the process ends.

    Raises:
      ConfigError: another run holds the lock (with its pid), or a lock file is not a plain file.
    """
    with contextlib.ExitStack() as held:
        held.callback(_lock(folder / ".lock", shared=shard.count > 1).release)
        if shard.count > 1:
            held.callback(_lock(folder / f".lock{shard.suffix}").release)
        yield


def _lock(path: Path, shared: bool = False) -> FolderLock:
    try:
        return FolderLock(path, shared)
    except FolderInUse as holder:
        raise ConfigError(f"{path.parent} is in use by a run with pid {holder}; wait for it or use --out") from None
