"""The bundle: a folder with all records of a trace. `tracing(folder)` collects and writes it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jinja2

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.units import byte_size
from ksana_jax.engine import build
from ksana_jax.engine.engine import Engine
from ksana_jax.lab import recording
from ksana_jax.lab.runs.environment import environment
from ksana_jax.lab.runs.machine_load import Load
from ksana_jax.lab.trace import step_parts
from ksana_jax.lab.trace.functions import CompilationLog
from ksana_jax.lab.trace.parts import call_starts, operations, parted, seconds_by_part
from ksana_jax.lab.trace.profile import Profiler
from ksana_jax.lab.trace.recorder import Recorder
from ksana_jax.lab.trace.summary import compile_summary, summary
from ksana_jax.lab.trace.timeline import timeline
from ksana_jax.methods.presets import read_pattern

FORMAT = 2
# Steps that run under the profiler. A profile of 64 steps of eight layers is a few megabytes.
PROFILED_STEPS = 64
# Environment variables that change what XLA and jax compile, or how fast it runs.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "OMP_NUM_THREADS", "JAX_", "KSANA_")
_SECRETS = ("_KEY", "_TOKEN")


@dataclasses.dataclass
class TraceBundle:
    """State of a trace; `tracing` yields it and writes it at the end.

    recorders: of each engine. decisions: whether they record these.
    """

    folder: Path
    command: str
    log: CompilationLog
    profiler: Profiler
    decisions: bool = False
    recorders: list[Recorder] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.time)
    load: Load = dataclasses.field(default_factory=Load)

    def watch(self, engine: Engine) -> None:
        """Records an engine from now on."""
        number = len(self.recorders) + 1
        given = {"decisions": self.decisions, "number": number, "log": self.log, "profiler": self.profiler}
        self.recorders.append(Recorder(engine, **given))

    def stop(self) -> None:
        """Stops all recorders."""
        self.profiler.stop()
        for recorder in reversed(self.recorders):
            recorder.stop()

    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part of the model in the profile, empty without one; and gives steps theirs."""
        if not self.profiler.steps:
            return {}
        folder = self.profiler.folder
        ran = parted(operations(folder), [p for f in self.log.functions for p in f.programs])
        step_parts.divide(ran, self.profiler.calls, call_starts(folder))
        return seconds_by_part(ran)


@contextlib.contextmanager
def tracing(
    folder: str | Path, *, command: str = "", profile_steps: int = PROFILED_STEPS, record: bool = False
) -> Iterator[TraceBundle]:
    """Traces every engine that is built inside, and writes a bundle: index.html, trace.json, and the files it names.

        with tracing("runs/trace"):
            llm = LLM("ksana-tiny")
            llm.generate("def main(")

    Outside of it nothing is watched, at no cost.

    Args:
      folder: must not exist, or be empty.
      command: shown on the page.
      profile_steps: steps that run under jax's profiler, from the first that compiles nothing; 0 runs no profiler.
      record: also record decisions, prompts and tokens of each engine, for `ksana trace replay` and `ksana compare`.

    Raises:
      ConfigError: the folder has files.
    """
    folder = Path(folder)
    check_new(folder)
    log = CompilationLog(folder / "functions")
    trace = TraceBundle(folder, command, log, Profiler(folder / "profile", profile_steps), record)
    build.observers.append(trace.watch)
    # A program from jax's cache on disk may have been compiled from the same operations in other scopes.
    shared = jax.config.jax_compilation_cache_include_metadata_in_key  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        with log:
            yield trace
    finally:
        build.observers.remove(trace.watch)
        jax.config.update("jax_compilation_cache_include_metadata_in_key", shared)
        trace.stop()
        if trace.recorders:
            _write(trace)


def check_new(folder: Path) -> None:
    """Raises ConfigError unless a folder can be made, or is empty."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: a trace is written to a folder of its own")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")


def _write(trace: TraceBundle) -> None:
    """Writes a trace's files; the profile and the compiled functions already exist."""
    about = {"environment": environment(), "load": trace.load.read()}
    parts, engines, events = trace.parts(), [], []
    for recorder in trace.recorders:
        header = recorder.header
        patterns = "; ".join({str(read_pattern(given)): None for given in header["patterns"]})
        facts = {"engine": recorder.number, **header, "patterns": patterns, "num_requests": len(recorder.requests)}
        engines.append(facts | summary(recorder.steps, parts, recorder.flops))
        events.append(recorder.plain())
        folder = trace.folder / f"engine-{recorder.number}"
        recording.write(folder / recording.NAME, header, events[-1])
        made = step_parts.table(step.plain() for step in recorder.steps)
        engines[-1]["parts"] = made._asdict()
        if made.cells:
            step_parts.write(folder, made, about)
    write_atomic(trace.folder / "timeline.json", timeline(events))
    content = {
        "format": FORMAT,
        "command": trace.command,
        "time": trace.began,
        **about,
        "variables": variables(),
        "engines": engines,
        "compilations": compile_summary(trace.log.functions),
        "functions": [function.plain() for function in trace.log.functions],
    }
    write_atomic(trace.folder / "trace.json", json.dumps(content, indent=1) + "\n")
    write_atomic(trace.folder / "index.html", render(content))


def variables() -> dict[str, str]:
    """Returns the environment variables that a bundle carries: no keys and tokens, which must not travel with it."""
    given = sorted(os.environ.items())
    return {name: value for name, value in given if name.startswith(VARIABLES) and not name.endswith(_SECRETS)}


def render(content: Mapping[str, Any]) -> str:
    """Returns the page of a trace: summary tables in one HTML file without scripts that loads nothing.

    content: of trace.json.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"fmt": lambda value, spec: "-" if value is None else format(value, spec), "size": byte_size}
    template = environment.from_string(resources.files("ksana_jax").joinpath("assets/trace.html").read_text("utf-8"))
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(content["time"]))
    return template.render({**content, "when": when})
