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
from ksana_jax.scheduler.step.types import StepShape, TileGroup

FORMAT = 2
NAME = "recording.jsonl"
Event = dict[str, Any]
_REQUEST = {"request_id": str, "prompt_token_ids": [int], "params": dict, "seeds": [int], "cache_salt": str}
_REQUEST |= {"num_question": int, "streams": bool, "arrival_s": int | float}
# Fields that a replay needs, of the first line and of each event, and their types: [x] is a list of any length, a tuple
# one of that length, and {...: x} an object with any keys.
_NEEDED: dict[str, dict[str, Any]] = {
    "recording": {"ksana_jax": str, "jax": str, "model": str | None, "load_format": str | None, "device": str | None}
    | {"implementation": str | None, "digest": str, "patterns": [dict], "config": dict, "opaque": [str]},
    "created": {"requests": [_REQUEST]},
    "added": {"request_ids": [str]},
    "aborted": {"request_id": str},
    "patterns": {"patterns": [dict]},
    "eviction": {"method": dict},
    "step": {"step": int, "rows": [(str, int, int)], "blocks": dict, "tokens": {...: int | list}},
    "request": {},
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
    created: set[str] = set()
    if not found.header.get("decisions"):
        raise ConfigError(f"{found.path} has times without decisions: `ksana trace run --record` records both")
    for number, event in enumerate((found.header, *found.events), 1):
        if (kind := event["event"]) not in _NEEDED:
            raise ConfigError(f"{found.path}, line {number:,}: recordings have no event {checks.shown(kind)}")
        if missing := [name for name in _NEEDED[kind] if name not in event]:
            raise ConfigError(f"{found.path}, line {number:,}: {kind} has no field {missing[0]!r}")
        if wrong := [name for name, wanted in _NEEDED[kind].items() if not _fits(event[name], wanted)]:
            value = checks.shown(event[wrong[0]])
            raise ConfigError(f"{found.path}, line {number:,}: {wrong[0]} is {value}, which no {kind!r} has")
        if unknown := sorted({*event["opaque"]} - event["config"].keys()) if kind == "recording" else ():
            raise ConfigError(f"{found.path}, line 1: opaque has {unknown[0]!r:.80}, which is not in config")
        if kind == "created":
            created |= {request["request_id"] for request in event["requests"]}
        for name in event["request_ids"] if kind == "added" else ():
            if name not in created:
                raise ConfigError(f"{found.path}, line {number:,}: no request {name!r:.80} was created and not added")
            created.remove(name)
    return found


def _fits(value: Any, kind: Any) -> bool:
    """True if a value has a type of `_NEEDED`."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0]) for item in value)
    if isinstance(kind, tuple):
        return isinstance(value, list) and len(value) == len(kind) and all(map(_fits, value, kind))
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return False
        names = value if ... in kind else kind
        return all(name in value and _fits(value[name], kind.get(name, kind.get(...))) for name in names)
    return isinstance(value, kind)


def _inside(path: Path) -> list[Path]:
    return [path / NAME] if (path / NAME).is_file() else sorted(path.glob(f"engine-*/{NAME}"))


def _read_lines(path: Path) -> list[Any]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, RecursionError):
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
    return StepShape(tuple(TileGroup(*part) for part in parts), *others)
