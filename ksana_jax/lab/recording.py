"""Recordings, as lines of JSON: what an engine was asked, did in each step, and answered. No jax.

The first line describes the engine; each further line is an event, in order:

  created   requests, with prompts, parameters and the seeds of their completions
  added     their ids, when they entered the engine
  aborted   an id
  patterns, eviction   settings that were changed in between
  step      the fields of the engine's `StepRecord`; in a trace also `StepTrace`'s. rows: [sequence, tokens
            computed before, tokens to compute], in the order of the batch; a sequence is named request/completion.
            blocks: for each sequence whose block table changed how many of its blocks it kept, and the ids after them.
            tokens: sampled, by sequence. Times are seconds on the engine's clock.
  request   its times and counts; these events come last

A recording without decisions has steps without rows, blocks and tokens, and requests. `ksana simulate record` writes
steps alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.metrics import StepRecord
from ksana_jax.scheduler.step.types import Part, StepShape

FORMAT = 2
NAME = "recording.jsonl"
Event = dict[str, Any]
# Fields that a replay needs: of the first line, and of each event.
_NEEDED = {
    "recording": "ksana_jax jax model load_format device implementation digest patterns config opaque",
    "created": "requests",
    "added": "request_ids",
    "aborted": "request_id",
    "patterns": "patterns",
    "eviction": "method",
    "step": "step rows blocks tokens",
    "request": "",
}


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording that was read. header: the first line. events: the other lines."""

    path: Path
    header: dict[str, Any]
    events: list[Event]

    @property
    def steps(self) -> list[Event]:
        return events_of("step", self.events)

    @property
    def num_requests(self) -> int:
        return sum(len(event["requests"]) for event in events_of("created", self.events))

    def records(self) -> list[StepRecord]:
        """Returns the engine's records of all steps.

        Raises:
          ConfigError: there are none, or a step lacks a field or has a wrong one; names the line.
        """
        numbered = enumerate(self.events, 2)
        found = [_read_record(f"{self.path}, line {n:,}", event) for n, event in numbered if event["event"] == "step"]
        if not found:
            raise ConfigError(f"{self.path} has no steps: nothing was computed")
        return found


def events_of(kind: str, events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def is_recording(path: Path) -> bool:
    """True if a path is a recording, or a folder with one."""
    return path.suffix == ".jsonl" and path.name != "records.jsonl" if path.is_file() else bool(_inside(path))


def read(path: Path) -> Recording:
    """Reads a recording: a file, the folder that it is in, or the folder of a trace with one engine.

    Raises:
      ConfigError: there is none, or more than one; or it is not of a format that is read.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    found = [path] if path.is_file() else _inside(path)
    if not found:
        raise ConfigError(f"{path} has no {NAME}: `ksana trace` writes one for each engine")
    if len(found) > 1:
        raise ConfigError(f"{path} has recordings of {len(found)} engines: give one, such as {found[0]}")
    header, *events = _read_lines(found[0])
    if header.get("event") != "recording":
        raise ConfigError(f"{found[0]} is not a recording")
    if header.get("format") != FORMAT:
        raise ConfigError(f"{found[0]} is a recording of format {header.get('format')}, this version reads {FORMAT}")
    return Recording(found[0], header, events)


def read_decisions(path: Path) -> Recording:
    """Reads a recording that can be replayed.

    Raises:
      ConfigError: see `read`; or it has no decisions, or an event is unknown or lacks a field; names the line.
    """
    found = read(path)
    if not found.header.get("decisions"):
        raise ConfigError(f"{found.path} has times without decisions: `ksana trace --record` records both")
    for number, event in enumerate((found.header, *found.events), 1):
        if (kind := event["event"]) not in _NEEDED:
            raise ConfigError(f"{found.path}, line {number:,}: recordings have no event {checks.shown(kind)}")
        if missing := [name for name in _NEEDED[kind].split() if name not in event]:
            raise ConfigError(f"{found.path}, line {number:,}: {kind} has no field {missing[0]!r}")
    return found


def _inside(path: Path) -> list[Path]:
    return [path / NAME] if (path / NAME).is_file() else sorted(path.glob(f"engine-*/{NAME}"))


def _read_lines(path: Path) -> list[Any]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError:
        lines = []
    if not lines or not isinstance(lines[0], dict):
        raise ConfigError(f"{path} is not a recording")
    for number, line in enumerate(lines[1:], 2):
        if lines[0].get("event") == "recording" and not (isinstance(line, dict) and isinstance(line.get("event"), str)):
            raise ConfigError(f"{path}, line {number:,} is {checks.shown(line)}, must be an event")
    return lines


def write(path: Path, header: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Writes a recording; its folder is made if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"event": "recording", "format": FORMAT, **header}), *map(json.dumps, events)]
    write_atomic(path, "\n".join(lines) + "\n")


def plain_record(record: StepRecord) -> Event:
    """Returns an engine's record of a step as an event."""
    return {"event": "step", **record._asdict(), "shape": plain_shape(record.shape)}


def _read_record(place: str, event: Event) -> StepRecord:
    """Returns the record of an event. place: of the event, for errors."""
    names, defaults = StepRecord._fields, StepRecord._field_defaults
    if missing := [name for name in names if name not in event and (name not in defaults or name == "shape")]:
        raise ConfigError(f"{place}: there is no field {missing[0]!r}")
    given = {name: event[name] for name in names if name in event}
    given["compiled"] = bool(event.get("compiled") or event.get("profiled"))  # neither took its own time
    try:
        given["shape"] = read_shape(event["shape"])
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: shape is {checks.shown(event['shape'])}, must be the shape of a step") from None
    numbers = {name: value for name, value in given.items() if name not in ("shape", "compiled")}
    checks.require(*(checks.number(f"{place}: {name}", value) for name, value in numbers.items()), error=ConfigError)
    return StepRecord(**given)


def plain_shape(shape: StepShape) -> list[Any]:
    """Returns a shape as lists of numbers."""
    return [[list(part) for part in shape.parts], *shape[1:]]


def read_shape(given: Sequence[Any]) -> StepShape:
    """Returns the shape of `plain_shape`."""
    parts, *others = given
    return StepShape(tuple(Part(*part) for part in parts), *others)
