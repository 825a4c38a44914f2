"""Replays a recording: the same requests enter an engine before the same steps, and each step is compared."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.core.own_code import names_code, texts
from ksana_jax.core.plugins import trusting
from ksana_jax.core.sources import expanded, model_path
from ksana_jax.engine.engine import Engine, Request
from ksana_jax.engine.llm import LLM
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.lab.recording import Event, Recording, events_of
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


# Settings of a recording that name places of the machine that wrote it: folders, devices, hosts.
PLACES = ("disk_cache_dir", "device", "distributed")


def make_llm(recording: Recording, settings: Mapping[str, Any] | None = None, *, own_code: bool = False) -> LLM:
    """Creates the engine of a recording, which another user may have made: it downloads nothing and leaves out PLACES.

    Args:
      settings: fields of `EngineConfig` that differ from the recorded ones.
      own_code: import own code that the recording names.

    Raises:
      ConfigError: the version of the package or of jax differs, the weights differ or cannot be found, a setting was an
        object of Python, or own code is named that may not be imported.
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
    named = [text for text in texts(header["config"]) if names_code(text)]
    if named and not own_code:
        raise ConfigError(f"{recording.path} names own code, {named[0]!r:.80}, which runs only with --own-code")
    _check_local(recording)
    given = {name: value for name, value in header["config"].items() if name not in PLACES} | dict(settings)
    llm = LLM(header["model"], load_format=header["load_format"], pattern=_patterns(header["patterns"]), **given)
    check_model(recording, llm.engine)
    return llm


def _check_local(recording: Recording) -> None:
    """Checks that models and adapters of a recording are on this machine: names of others are not downloaded.

    Raises:
      LoadError: one is not.
    """
    draft = recording.header["config"].get("speculative_config") or {}
    for model in filter(None, (recording.header["model"], draft.get("model"))):
        model_path(model, download=False)
    for created in events_of("created", recording.events):
        for adapter in filter(None, (request.get("lora_request") for request in created["requests"])):
            if not os.path.exists(expanded(adapter["lora_path"])):
                raise LoadError(f"{recording.path}: the adapter {adapter['lora_path']!r:.200} is not on this machine")


def check_model(recording: Recording, engine: Engine) -> None:
    """Raises ConfigError unless an engine has the model of a recording, weights included."""
    if (here := digest(engine)) != recording.header["digest"]:
        model = recording.header["model"] or "the model"
        raise ConfigError(
            f"{recording.path} was recorded with other weights of {model}: digest {recording.header['digest'][:8]}, "
            f"here {here[:8]}"
        )


def replay(recording: Recording, engine: Engine, *, to_the_end: bool = False, own_code: bool = False) -> Replay:
    """Replays a recording on an idle engine that has served nothing yet.

    Args:
      to_the_end: continue after the first difference, until every request has ended.
      own_code: import own eviction methods that the recording names.
    """
    recorder = Recorder(engine)
    waiting: dict[str, Request] = {}
    found = None
    try:
        for event in recording.events:
            if event["event"] != "step":
                with trusting(None if own_code else ()):
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
