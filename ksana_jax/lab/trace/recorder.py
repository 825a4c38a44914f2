"""Records one engine from outside: arrivals, decisions, blocks, tokens. It changes nothing that it sees."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax

import ksana_jax
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.request import FinishReason
from ksana_jax.engine.engine import Engine, Request
from ksana_jax.engine.fingerprint import fingerprint
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.lab.trace import recording
from ksana_jax.lab.trace.wrapping import Wrappers
from ksana_jax.scheduler.running import StepResult
from ksana_jax.scheduler.step.types import ScheduledBatch


class Recorder:
    """Records an engine until `stop`.

    Attributes:
      events: so far, as `recording` describes them. num_steps: those among them that are steps.
    """

    def __init__(self, engine: Engine):
        self.events: list[recording.Event] = []
        self.num_steps = 0
        self._header = header(engine)
        # Weakly: a dropped engine must free its pool.
        self._engine = weakref.ref(engine)
        self._clock = engine.clock
        self._created: dict[str, Request] = {}
        self._open: dict[str, Request] = {}
        self._blocks: dict[str, list[int]] = {}
        self._scheduled: dict[int, tuple[recording.Event, dict[int, str]]] = {}
        self._wrappers = Wrappers()
        self._wrappers.add(engine, "factory", "new_requests", self._create)
        self._wrappers.add(engine, "", "add", self._add)
        self._wrappers.add(engine, "", "set_patterns", self._set_patterns)
        self._wrappers.add(engine, "", "set_eviction", self._set_eviction)
        self._wrappers.add(engine, "scheduler", "_schedule", self._schedule)
        self._wrappers.add(engine, "scheduler", "settle", self._settle)

    def stop(self) -> None:
        """Leaves the engine as it was."""
        if (engine := self._engine()) is not None:
            self._wrappers.remove(engine)

    def write(self, path: Path) -> None:
        """Writes the recording."""
        recording.write(path, self._header, self.events)

    def _create(self, method: Callable[..., list[Request]], *args: Any, **given: Any) -> list[Request]:
        made = method(*args, **given)
        if (engine := self._engine()) is not None:
            self._header |= source_of(engine)  # an LLM sets it after its engine was built
        asked = args[0] if args else given["asked"]
        self._created |= {request.request_id: request for request in made}
        self.events.append({"event": "created", "requests": list(map(_plain, made, asked))})
        return made

    def _add(self, method: Callable[..., None], requests: Collection[Request]) -> None:
        method(requests)
        for request in requests:
            self._created.pop(request.request_id, None)
            self._open[request.request_id] = request
        self.events.append({"event": "added", "request_ids": [request.request_id for request in requests]})

    def _set_patterns(self, method: Callable[..., None], patterns: Sequence[AttentionPattern]) -> None:
        method(patterns)
        self.events.append({"event": "patterns", "patterns": plain_patterns(patterns)})

    def _set_eviction(self, method: Callable[..., None], eviction: EvictionMethod) -> None:
        method(eviction)
        fields = {k: v for k, v in dataclasses.asdict(eviction).items()}  # pyright: ignore[reportArgumentType]
        name = f"{type(eviction).__module__}:{type(eviction).__qualname__}"
        self.events.append({"event": "eviction", "method": {"method": name, **fields}})

    def _schedule(self, method: Callable[..., ScheduledBatch | None], **given: bool) -> ScheduledBatch | None:
        self._note_ended()
        batch = method(**given)
        engine = self._engine()
        if batch is None or engine is None:
            return batch
        rows = engine.scheduler.rows
        names = {row: f"{seq.request_id}/{seq.index}" for row in batch.rows.tolist() if (seq := rows.seqs[row])}
        counts = zip(batch.rows.tolist(), batch.num_per_row.tolist(), strict=True)
        decided = [[names[row], int(rows.num_computed[row]), int(count)] for row, count in counts]
        event = {
            "event": "step",
            "step": 0,
            "rows": decided,
            "blocks": {
                name: change for row, name in names.items() if (change := self._new_blocks(name, rows.block_ids(row)))
            },
            "num_preemptions": engine.scheduler.num_preemptions,
            "began_s": self._clock(),
        }
        self._scheduled[id(batch)] = event, names
        return batch

    def _settle(
        self, method: Callable[..., StepResult], batch: ScheduledBatch, tokens: Any, num_accepted: Any = None
    ) -> StepResult:
        self._note_ended()  # by an abort between two steps of one call
        event, names = self._scheduled.pop(id(batch))
        runs = tokens.tolist()
        if num_accepted is not None:
            runs = [run[: count + 1] for run, count in zip(runs, num_accepted.tolist(), strict=True)]
        sampled = {names[row]: run for row, run in zip(batch.sampled.tolist(), runs, strict=True)}
        result = method(batch, tokens, num_accepted)
        self.num_steps += 1
        self.events.append(event | {"step": self.num_steps, "tokens": sampled, "ended_s": self._clock()})
        return result

    def _note_ended(self) -> None:
        """Forgets requests that have ended; those that somebody ended between two steps are events."""
        for request_id, request in list(self._open.items()):
            if request.finished:
                del self._open[request_id]
                if any(c.seq.finish_reason is FinishReason.ABORT for c in request.completions):
                    self.events.append({"event": "aborted", "request_id": request_id})

    def _new_blocks(self, name: str, ids: Any) -> list[Any] | None:
        """Returns how many blocks of its table a sequence kept, and those after them; None if nothing changed."""
        now, before = ids.tolist(), self._blocks.get(name, [])
        self._blocks[name] = now
        kept = 0
        while kept < min(len(now), len(before)) and now[kept] == before[kept]:
            kept += 1
        return None if kept == len(now) == len(before) else [kept, now[kept:]]


def header(engine: Engine) -> dict[str, Any]:
    """Describes an engine for its recording: versions, settings, patterns, and a digest of the model."""
    config, opaque = {}, []
    for field in dataclasses.fields(engine.config):
        value = getattr(engine.config, field.name)
        try:
            config[field.name] = json.loads(json.dumps(value, default=dataclasses.asdict))
        except TypeError:
            config[field.name] = repr(value)
            opaque.append(field.name)
    implementation = getattr(engine.executor, "implementation", None)
    return {
        **versions(),
        "device": jax.devices()[0].device_kind,
        "implementation": None if implementation is None else implementation.name,
        "digest": digest(engine),
        "patterns": plain_patterns(engine.executor.patterns),
        "config": config,
        "opaque": opaque,
    } | source_of(engine)


def versions() -> dict[str, str]:
    """Returns the versions on which decisions and tokens depend."""
    return {"ksana_jax": ksana_jax.__version__, "jax": jax.__version__}


def source_of(engine: Engine) -> dict[str, Any]:
    """Returns where the engine's weights came from."""
    model, load_format = engine.source or (None, None)
    return {"model": model, "load_format": load_format}


def digest(engine: Engine) -> str:
    """Returns a digest of the model's config and weights."""
    params = getattr(engine.executor, "params", None)
    if params is None:
        return hashlib.sha256(str(engine.model).encode()).hexdigest()[:32]
    return fingerprint(engine.model, params, dtype=engine.config.dtype, kv_dtype="", max_model_len=engine.max_model_len)


def plain_patterns(patterns: Sequence[AttentionPattern]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(pattern) for pattern in patterns]


def _plain(request: Request, asked: Any) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids.tolist(),
        "params": recording.plain_params(request.params),
        "seeds": [completion.seq.seed for completion in request.completions],
        "cache_salt": asked.cache_salt,
        "num_question": asked.num_question,
        "streams": asked.streams,
        "arrival_s": request.metrics.arrival_s,
    }
