"""The bundle: a folder with everything that a trace saw. `tracing(folder)` collects and writes it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.engine import build
from ksana_jax.engine.engine import Engine, Request
from ksana_jax.lab.experiments.environment import environment
from ksana_jax.lab.trace import page, recording
from ksana_jax.lab.trace.functions import CompilationLog
from ksana_jax.lab.trace.parts import operations, seconds_by_part
from ksana_jax.lab.trace.profile import Profiler
from ksana_jax.lab.trace.recorder import Recorder
from ksana_jax.lab.trace.summary import compile_summary, summary
from ksana_jax.lab.trace.timeline import timeline
from ksana_jax.lab.trace.watch import EngineWatch
from ksana_jax.runner import compiling

FORMAT = 1
# Steps that run under the profiler. A profile of 64 steps of eight layers is a few megabytes.
PROFILED_STEPS = 64
# Environment variables that change what XLA and jax compile, or how fast it runs.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "OMP_NUM_THREADS", "JAX_", "KSANA_")
_SECRETS = ("_KEY", "_TOKEN")


@dataclasses.dataclass
class Trace:
    """What a trace has seen so far; `tracing` yields it and writes it at the end.

    engines: description of each engine, with its steps and requests in the watch of the same index.
    record: whether each engine is recorded, by the recorder of the same index.
    """

    folder: Path
    command: str
    log: CompilationLog
    profiler: Profiler
    record: bool = False
    engines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    watches: list[EngineWatch] = dataclasses.field(default_factory=list)
    recorders: list[Recorder] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.time)

    def watch(self, engine: Engine) -> None:
        """Watches an engine from now on."""
        number = len(self.watches) + 1
        self.engines.append(description(engine) | {"engine": number})
        self.watches.append(EngineWatch(engine, number, self.log, self.profiler.before_step, self.profiler.after_step))
        if self.record:
            self.recorders.append(Recorder(engine))

    def stop(self) -> None:
        """Leaves all engines as they were."""
        self.profiler.stop()
        for observer in (*reversed(self.recorders), *reversed(self.watches)):
            observer.stop()

    def plain(self) -> dict[str, Any]:
        """Returns the trace as plain values for JSON; lines of steps and requests are in files of their own."""
        parts = self.parts()
        return {
            **about_machine(self.command, self.began),
            "compilations": compile_summary(self.log.functions),
            "engines": [
                about | summary(watch.steps, parts) | {"num_requests": len(watch.requests)}
                for about, watch in zip(self.engines, self.watches, strict=True)
            ],
            "functions": [f.plain() for f in self.log.functions],
        }

    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part of the model in the profile; empty without one."""
        if not self.profiler.steps:
            return {}
        return seconds_by_part(operations(self.profiler.folder), [p for f in self.log.functions for p in f.programs])


@contextlib.contextmanager
def tracing(
    folder: str | Path, *, command: str = "", profile_steps: int = PROFILED_STEPS, record: bool = False
) -> Iterator[Trace]:
    """Traces every engine that is built inside, and writes a bundle: index.html, trace.json, and the files it names.

        with tracing("runs/trace"):
            llm = LLM("ksana-tiny")
            llm.generate("def main(")

    Outside of it nothing is watched, and nothing is paid.

    Args:
      folder: must not exist, or be empty.
      command: shown on the page.
      profile_steps: steps that run under jax's profiler, from the first that compiles nothing; 0 runs no profiler.
      record: also record each engine, for `ksana replay` and `ksana compare`.

    Raises:
      ConfigError: the folder has files.
    """
    folder = Path(folder)
    check_new(folder)
    log = CompilationLog(folder / "functions")
    trace = Trace(folder, command, log, Profiler(folder / "profile", profile_steps), record)
    build.observers.append(trace.watch)
    compiling.observers.append(log)
    # A program from jax's cache on disk may have been compiled from the same operations in other scopes.
    shared = jax.config.jax_compilation_cache_include_metadata_in_key  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        yield trace
    finally:
        build.observers.remove(trace.watch)
        compiling.observers.remove(log)
        jax.config.update("jax_compilation_cache_include_metadata_in_key", shared)
        trace.stop()
        if trace.watches:
            write(trace)


def check_new(folder: Path) -> None:
    """Raises ConfigError unless a folder can be made, or is empty."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: a trace is written to a folder of its own")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")


def write(trace: Trace) -> None:
    """Writes a trace's files; the profile and the compiled functions are there already."""
    trace.folder.mkdir(parents=True, exist_ok=True)
    content = trace.plain()
    steps = [[step.plain() for step in watch.steps] for watch in trace.watches]
    requests = [[plain_request(r) for r in watch.requests] for watch in trace.watches]
    for number, (of_steps, of_requests) in enumerate(zip(steps, requests, strict=True), 1):
        folder = trace.folder / f"engine-{number}"
        folder.mkdir(exist_ok=True)
        write_atomic(folder / "steps.jsonl", _lines(of_steps))
        write_atomic(folder / "requests.jsonl", _lines(of_requests))
        if trace.record:
            trace.recorders[number - 1].write(folder / recording.NAME)
    write_atomic(trace.folder / "trace.json", json.dumps(content, indent=1) + "\n")
    write_atomic(trace.folder / "timeline.json", json.dumps(timeline([*zip(steps, requests, strict=True)])) + "\n")
    write_atomic(trace.folder / "index.html", page.render(content))


def about_machine(command: str, began: float) -> dict[str, Any]:
    """Returns what every trace begins with: its command, when it began, machine, versions and flags."""
    return {
        "format": FORMAT,
        "command": command,
        "time": began,
        "environment": environment(),
        "variables": variables(),
    }


def variables() -> dict[str, str]:
    """Returns the environment variables that a bundle carries: no keys and tokens, which must not travel with it."""
    given = sorted(os.environ.items())
    return {name: value for name, value in given if name.startswith(VARIABLES) and not name.endswith(_SECRETS)}


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def plain_request(request: Request) -> dict[str, Any]:
    """Returns the times and counts of a request as plain values; times are on the engine's clock."""
    metrics = dataclasses.asdict(request.metrics)
    reasons = [c.seq.finish_reason for c in request.completions]
    return {
        "request_id": request.request_id,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "finish_reasons": [None if reason is None else reason.value for reason in reasons],
        **metrics,
    }


def description(engine: Engine) -> dict[str, Any]:
    """Describes an engine: model, settings, pool, and the implementation of attention that was chosen."""
    runner, layout = engine.executor, engine.scheduler.layout
    implementation = getattr(runner, "implementation", None)
    config = {k: v if _is_plain(v) else repr(v) for k, v in dataclasses.asdict(engine.config).items()}
    patterns = [str(pattern) for pattern in runner.patterns]
    return {
        "model": {
            "family": engine.model.family,
            "num_layers": engine.model.num_layers,
            "d_model": engine.model.d_model,
        },
        "implementation": None if implementation is None else implementation.name,
        "platform": getattr(runner, "platform", None),
        "patterns": patterns[0] if len(set(patterns)) == 1 else patterns,
        "num_blocks": engine.scheduler.blocks.num_blocks,
        "block_bytes": layout.block_bytes,
        "config": config,
    }


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
