"""What a run writes: append-only JSON lines, one a measurement, flushed at once; and how they are read back. No jax.

Kinds of line, each with "schema_version" and "kind":

  plan         name, title, task and rows of the experiment, whenever it differs from the last one written
  start        a trial begins: its id, label, seed, resolved config, and the environment (commit, versions, device)
  measurement  one number or curve of the trial that began last
  done         the trial is complete; lines of a trial without it count for nothing
  failed       the trial raised: "error" says what
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ksana_jax.config import ConfigError

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, counted from 1: the trials whose place in the plan is index - 1 modulo count."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads "k/n".

        Raises:
          ConfigError: it is not two integers with 1 <= k <= n.
        """
        k, _, n = text.partition("/")
        if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
            raise ConfigError(f"shard {text!r} is not k/n with 1 <= k <= n, for instance 1/4")
        return cls(int(k), int(n))

    @property
    def suffix(self) -> str:
        """Of this shard's file names; the whole has none."""
        return "" if self.count == 1 else f".{self.index}-of-{self.count}"


WHOLE = Shard()


@dataclasses.dataclass
class Records:
    """What an output folder holds.

    plan: the last one written. done: {trial id: its measurements}, finished trials only. failed: {trial id: error} of
    trials whose last attempt raised.
    """

    plan: dict[str, Any] | None = None
    done: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def read(folder: Path) -> Records:
    """All records of a folder, of all its shards.

    Raises:
      FileNotFoundError: the folder has none.
      ConfigError: a line in the middle is not a record, with file and line number.
    """
    files = sorted(folder.glob("records*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{folder}: no records.jsonl here; `ksana run` writes one")
    records = Records()
    for path in files:
        _read_file(path, records)
    return records


def _read_file(path: Path, records: Records) -> None:
    opened: dict[str, list[dict[str, Any]]] = {}
    for record in _lines(path):
        kind, trial = record["kind"], record.get("trial", "")
        if kind == "plan":
            if records.plan is None or record["time"] >= records.plan["time"]:
                records.plan = record
        elif kind == "start":
            opened[trial] = []
        elif kind == "measurement":
            opened[trial].append(record)
        elif kind == "done":
            records.done.setdefault(trial, opened.pop(trial))
            records.failed.pop(trial, None)
        elif kind == "failed" and trial not in records.done:
            records.failed[trial] = record["error"]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            # A run was killed within this line, or is writing it now.
            warnings.warn(f"{path}: the last line is torn and left out ({len(line)} bytes)", stacklevel=4)
            return
        try:
            record = json.loads(line)
            version = record["schema_version"]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} line {number} is not a record: {line[:60]!r}") from error
        if version != SCHEMA_VERSION:
            raise ConfigError(f"{path} line {number} has schema_version {version}, this version reads {SCHEMA_VERSION}")
        yield record


class RecordFile:
    """Appends records to one file. Opening it cuts off a torn last line, with a warning."""

    def __init__(self, path: Path):
        self._file: IO[bytes] = path.open("a+b")
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            warnings.warn(f"{path}: dropped a torn last line ({len(content) - whole} bytes)", stacklevel=2)
            self._file.truncate(whole)

    def append(self, kind: str, **fields: Any) -> None:
        """Writes one record and hands it to the operating system, so that killing this process cannot lose it."""
        line = json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, **fields}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if kind == "done":
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def locked(folder: Path, shard: Shard) -> Iterator[None]:
    """Holds a folder for one run; different shards share it. The kernel lets go when the process ends, however it ends.

    Raises:
      ConfigError: another run holds it, with its pid.
    """
    with contextlib.ExitStack() as held:
        whole = fcntl.LOCK_EX if shard.count == 1 else fcntl.LOCK_SH
        held.enter_context(_lock(folder / ".lock", whole))
        if shard.count > 1:
            held.enter_context(_lock(folder / f".lock{shard.suffix}", fcntl.LOCK_EX))
        yield


@contextlib.contextmanager
def _lock(path: Path, mode: int) -> Iterator[None]:
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ConfigError(
                f"{path.parent} is in use by a run with pid {holder}; wait for it or use --out"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)
