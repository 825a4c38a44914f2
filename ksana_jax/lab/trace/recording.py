"""Recordings: what an engine was asked, what it did in each step, and which tokens came of it, as lines of JSON.

The first line describes the engine (`header`); each further line is an event, in order:

  created   requests, with prompts, parameters and the seeds of their completions
  added     their ids, when they entered the engine
  aborted   an id
  patterns, eviction   settings that were changed in between
  step      the fields of `StepTrace` and of the engine's own `StepRecord`. rows: [sequence, tokens computed before,
            tokens to compute], in the order of the batch; a sequence is named request/completion. blocks: for each
            sequence whose block table changed how many of its blocks it kept, and the ids after them. tokens: sampled,
            by sequence. Times are seconds on the engine's clock.
  request   its times and counts; those of all requests come last

A recording without decisions has steps without rows, blocks and tokens, and requests.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.request import RequestInput, SamplingParams
from ksana_jax.engine.completion import Request

FORMAT = 2
# Format 1 had decisions alone.
READABLE = (1, 2)
NAME = "recording.jsonl"
Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording that was read. header: the first line. events: the others."""

    path: Path
    header: dict[str, Any]
    events: list[Event]

    @property
    def steps(self) -> list[Event]:
        return events_of("step", self.events)

    @property
    def num_requests(self) -> int:
        return sum(len(event["requests"]) for event in self.events if event["event"] == "created")


def events_of(kind: str, events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def is_recording(path: Path) -> bool:
    """Whether a path is a recording, or a folder with one."""
    return bool(_candidates(path))


def read(path: Path) -> Recording:
    """Reads a recording with decisions: a file, the folder that it is in, or the folder of a trace with one engine.

    Raises:
      ConfigError: there is none, or more than one; it is not of a format that is read, or has no decisions.
    """
    found = _candidates(path)
    if not found:
        raise ConfigError(f"{path} has no {NAME}: `ksana trace --record` writes one for each engine")
    if len(found) > 1:
        raise ConfigError(f"{path} has recordings of {len(found)} engines: give one, such as {found[0]}")
    try:
        header, *events = map(json.loads, found[0].read_text(encoding="utf-8").splitlines())
        is_one = header.get("event") == "recording"
    except (ValueError, AttributeError):
        is_one = False
    if not is_one:
        raise ConfigError(f"{found[0]} is not a recording")
    if header["format"] not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise ConfigError(f"{found[0]} is a recording of format {header['format']}, this version reads {known}")
    if not header.get("decisions", True):
        raise ConfigError(f"{found[0]} has times without decisions: `ksana trace --record` records both")
    return Recording(found[0], header, events)


def _candidates(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" and path.name != "records.jsonl" else []
    return [path / NAME] if (path / NAME).is_file() else sorted(path.glob(f"engine-*/{NAME}"))


def write(path: Path, header: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Writes a recording; its folder is made if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"event": "recording", "format": FORMAT, **header}), *map(json.dumps, events)]
    write_atomic(path, "\n".join(lines) + "\n")


def plain_input(request: Request, asked: RequestInput) -> dict[str, Any]:
    """Returns all that a replay needs of a request."""
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids.tolist(),
        "params": plain_params(request.params),
        "seeds": [completion.seq.seed for completion in request.completions],
        "cache_salt": asked.cache_salt,
        "num_question": asked.num_question,
        "streams": asked.streams,
        "arrival_s": request.metrics.arrival_s,
    }


def plain_request(request: Request) -> Event:
    """Returns the times and counts of a request as an event."""
    reasons = [c.seq.finish_reason for c in request.completions]
    return {
        "event": "request",
        "request_id": request.request_id,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "finish_reasons": [None if reason is None else reason.value for reason in reasons],
        **dataclasses.asdict(request.metrics),
    }


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Returns the fields of sampling parameters that are not the default, as plain values."""
    default = SamplingParams()
    fields = [field.name for field in dataclasses.fields(params)]
    return {name: value for name in fields if (value := getattr(params, name)) != getattr(default, name)}


def read_params(given: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters of `plain_params`; keys of JSON objects are strings."""
    bias = given.get("logit_bias")
    more: dict[str, Any] = {} if bias is None else {"logit_bias": {int(token): x for token, x in bias.items()}}
    return SamplingParams(**{**given, **more})
