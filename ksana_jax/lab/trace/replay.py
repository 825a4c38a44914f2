"""Replays a recording: the same requests enter an engine before the same steps, and each step is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.engine.engine import Engine, Request
from ksana_jax.engine.llm import LLM
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.lab.recording import Event, Recording
from ksana_jax.lab.trace.differences import Difference, difference
from ksana_jax.lab.trace.header import digest, versions
from ksana_jax.lab.trace.recorder import Recorder
from ksana_jax.lab.trace.requests import read_input
from ksana_jax.methods.presets import read_pattern


@dataclasses.dataclass(frozen=True)
class Replay:
    """A finished replay. difference: the first from the recording, at which it ended unless told otherwise; None if
    there is none. recorder: of the replay."""

    num_steps: int
    difference: Difference | None
    recorder: Recorder


def make_llm(recording: Recording, settings: Mapping[str, Any] | None = None) -> LLM:
    """Creates the engine of a recording.

    Args:
      settings: fields of `EngineConfig` that differ from the recorded ones.

    Raises:
      ConfigError: the version of the package or of jax differs, the weights differ or cannot be found, or a
        setting was an object of Python.
    """
    header, settings = recording.header, settings or {}
    for name, version in versions().items():
        if header[name] != version:
            raise ConfigError(f"{recording.path} was recorded with {name} {header[name]}, this is {version}")
    if header["model"] is None:
        raise ConfigError(f"{recording.path} is of an engine whose weights were in memory: replay it in Python")
    if opaque := [name for name in header["opaque"] if name not in settings]:
        name = opaque[0]
        raise ConfigError(f"{recording.path}: {name} was an object, {header['config'][name]}: give {name}=NAME")
    given = header["config"] | dict(settings)
    llm = LLM(header["model"], load_format=header["load_format"], pattern=_patterns(header["patterns"]), **given)
    check_model(recording, llm.engine)
    return llm


def check_model(recording: Recording, engine: Engine) -> None:
    """Raises ConfigError unless an engine has the model of a recording, weights included."""
    if (here := digest(engine)) != recording.header["digest"]:
        model = recording.header["model"] or "the model"
        raise ConfigError(
            f"{recording.path} was recorded with other weights of {model}: digest {recording.header['digest'][:8]}, "
            f"here {here[:8]}"
        )


def replay(recording: Recording, engine: Engine, *, to_the_end: bool = False) -> Replay:
    """Replays a recording on an idle engine that has served nothing yet.

    Args:
      to_the_end: continue after the first difference, until every request has ended.
    """
    recorder = Recorder(engine)
    waiting: dict[str, Request] = {}
    found = None
    try:
        for event in recording.events:
            if event["event"] != "step":
                _apply(event, engine, waiting)
                continue
            mine = _step(engine, recorder)
            found = found or difference(event, mine)
            if found and not to_the_end:
                break
        while to_the_end and engine.has_work:
            _step(engine, recorder)
    finally:
        recorder.stop()
    return Replay(len(recorder.steps), found, recorder)


def _step(engine: Engine, recorder: Recorder) -> Event | None:
    """Computes one step, waiting for the disk if need be; None if there is nothing to compute."""
    before = len(recorder.steps)
    while len(recorder.steps) == before:
        if not engine.has_work:
            return None
        engine.step()
    return recorder.steps[-1].plain()


def _apply(event: Event, engine: Engine, waiting: dict[str, Request]) -> None:
    """Repeats the recording's events between steps."""
    kind = event["event"]
    if kind == "created":
        made = engine.new_requests([read_input(given) for given in event["requests"]])
        for request, given in zip(made, event["requests"], strict=True):
            waiting[request.request_id] = request
            request.metrics.arrival_s = given["arrival_s"]
            for completion, seed in zip(request.completions, given["seeds"], strict=True):
                completion.seq.seed = seed
    elif kind == "added":
        engine.add([waiting.pop(request_id) for request_id in event["request_ids"]])
    elif kind == "aborted":
        engine.abort(event["request_id"])
    elif kind == "patterns":
        engine.set_patterns(_patterns(event["patterns"]))
    elif kind == "eviction":
        method = read_eviction(event["method"])
        assert method is not None
        engine.set_eviction(method)


def _patterns(given: Any) -> list[Any]:
    return [read_pattern(fields) for fields in given]
