"""Process 0 (driver) of several that divide a model: forwards every runner call to the worker processes.

Each call goes out before process 0 starts on it, under one lock, so that all processes start the same programs in
the same order; their collectives then find each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.sources import model_path
from ksana_jax.engine.device_setup import DeviceSetup, Prepared
from ksana_jax.engine.distributed.job import Job
from ksana_jax.kv.moves import Moves
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepInput, StepOutput

# Settings that concern process 0 alone, such as functions and the places of processes.
OF_PROCESS_0 = ("policy", "prefix_replacement", "distributed", "device")


def facts(prepared: Prepared, model: str, load_format: str) -> dict[str, Any]:
    """Returns values that must be equal in all processes, by their names in errors."""
    path = model_path(model, weights=load_format != "dummy")
    return {
        "operators.attention": prepared.trial.implementation.name,
        "operators.linear": prepared.config.operators.linear,
        "the device": prepared.placement.device.device_kind,
        "model files with the digest": digest_of_files(path, load_format),
    }


class Workers:
    """The other processes of a job, for one engine.

    Args:
      model, load_format: as in `LLM`; each process reads the model from its own disk.
    """

    _numbers = itertools.count()

    def __init__(self, job: Job, model: str, load_format: str):
        self.job, self.model, self.load_format = job, model, load_format
        self.number = next(self._numbers)

    def load(
        self,
        prepare: Callable[[], Prepared],
        config: EngineConfig,
        patterns: Seq[AttentionPattern],
        params: Any,
        programs: dict[Any, Any] | None,
    ) -> DeviceSetup:
        """Prepares and loads the device half here and in all other processes.

        Raises:
          ConfigError: one of them cannot, or differs from this one.
          JobError: a process is lost.
        """
        try:
            with self.job.lock:
                settings = {name: value for name, value in config.plain().items() if name not in OF_PROCESS_0}
                prepared, num_blocks = self._prepare(prepare, settings, patterns)
                self._send("load", num_blocks)
                with self.job.together(collective=False):
                    half = prepared.load(params, num_blocks, self._made, programs)
                self._everyone(None)
        except Exception:
            self.close()
            raise
        return half

    def _prepare(
        self, prepare: Callable[[], Prepared], settings: dict[str, Any], patterns: Seq[AttentionPattern]
    ) -> tuple[Prepared, int]:
        """Returns the prepared half of this process, and the number of blocks for which all have room."""
        self._send("prepare", self.model, self.load_format, settings, list(patterns))
        prepared = problem = None
        try:
            prepared = prepare()
            said = facts(prepared, self.model, self.load_format) | settings | {"patterns": list(patterns)}
            said["num_blocks"] = prepared.plan.num_blocks
        except Exception as error:
            problem, said = error, {"error": " ".join(str(error).split())}
        everyone = self._everyone(said)
        if problem is not None:
            raise problem
        assert prepared is not None
        for who, other in everyone:
            if "error" in other:
                raise ConfigError(f"{who}: {other['error']}")
            for name, value in said.items():
                if name != "num_blocks" and other[name] != value:
                    own = self.job.setting.process_id
                    raise ConfigError(f"{who} has {name} {other[name]}, process {own} has {value}")
        return prepared, min(said["num_blocks"], *(other["num_blocks"] for _, other in everyone))

    def _everyone(self, said: Any) -> list[tuple[str, Any]]:
        """Returns the processes with what they say, after they have prepared, loaded or compiled."""
        return [(str(peer), reply) for peer, reply in self.job.replies()]

    def _made(self, *args: Any, **settings: Any) -> DriverRunner:
        runner = DriverRunner(self, *args, **settings)
        weakref.finalize(runner, self.job.closing.append, self.number)
        return runner

    def _send(self, what: str, *rest: Any) -> None:
        with self.job.lock:
            while self.job.closing:
                self.job.send(("close", self.job.closing.popleft()))
            self.job.send((what, self.number, *rest))

    @contextlib.contextmanager
    def doing(self, what: str, *rest: Any) -> Iterator[None]:
        """Sends a call to the other processes, and surrounds the same call in this one.

        Raises:
          JobError: the job has failed.
        """
        with self.job.lock:
            self._send(what, *rest)
            with self.job.together():
                yield

    def close(self) -> None:
        """Frees the engine in the other processes."""
        with contextlib.suppress(Exception):  # the job has failed, which other calls report
            self._send("close")


class SameCalls(Workers):
    """The other processes of an SPMD program, for one engine: each makes the same calls, and digests are compared."""

    def _send(self, what: str, *rest: Any) -> None:
        if what == "prepare":
            return  # settings are compared by their names
        with self.job.lock, self.job.together(collective=False):
            first, *others = self.job.agree((what, self.number, digest(rest)))
        for index, other in enumerate(others, 1):
            if other != first:
                self.job.fail(f"process {index} calls {_shown(other)}, process 0 {_shown(first)}: all make equal calls")
        self.job.check()

    def _prepare(
        self, prepare: Callable[[], Prepared], settings: dict[str, Any], patterns: Seq[AttentionPattern]
    ) -> tuple[Prepared, int]:
        if settings["host_cache_bytes"] and settings["preempt"] == "auto":
            raise ConfigError(
                "distributed spmd does not go with preempt auto and host_cache_bytes: measured times decide, which "
                "differ between processes; set preempt to swap or recompute"
            )
        return super()._prepare(prepare, settings, patterns)

    def _everyone(self, said: Any) -> list[tuple[str, Any]]:
        return [(f"process {index}", other) for index, other in enumerate(self.job.agree(said))]

    def close(self) -> None:
        """Does nothing: each process frees its own."""


def _shown(call: tuple[str, int, str]) -> str:
    what, number, of = call
    return f"{what} of engine {number} with inputs {of}"


def digest(inputs: Any) -> str:
    """Returns a digest of values and arrays, which is the same in all processes with equal ones."""
    found = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, np.ndarray):
            found.update(f"{x.dtype.str}{x.shape}".encode() + x.tobytes())
        elif isinstance(x, dict):
            add(list(x.items()))
        elif isinstance(x, (list, tuple)):
            found.update(f"{type(x).__name__}{len(x)}".encode())
            for part in x:
                add(part)
        elif dataclasses.is_dataclass(x):
            add([(field.name, getattr(x, field.name)) for field in dataclasses.fields(x)])
        else:
            found.update(f"{type(x).__name__} {x}".encode())

    add(inputs)
    return found.hexdigest()[:12]


class DriverRunner(Runner):
    """The runner of process 0, with the contract of `Runner`; whatever it does, the other processes do.

    Args:
      workers: the other processes. settings: of `Runner`.
    """

    def __init__(self, workers: Workers, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.workers = workers

    def _run(self, step: StepInput) -> StepOutput:
        if callable(step.mask):
            step.mask = step.mask()
        with self.workers.doing("step", step):
            return self._watched(super()._run(step))

    def run_loop(self, steps: Seq[StepInput], *settings: Any) -> tuple[list[StepOutput], Any]:
        with self.workers.doing("loop", list(steps)):
            outputs, drawn_from = super().run_loop(steps, *settings)
            return [self._watched(output) for output in outputs], drawn_from

    def _watched(self, output: StepOutput) -> StepOutput:
        """Has a step raise JobError when the job has failed, instead of errors of its collectives."""
        fetch, job = output.fetch, self.workers.job

        def together(output: StepOutput) -> None:
            assert fetch is not None
            with job.together():
                fetch(output)

        output.fetch = together
        return output

    def move(self, moves: Moves) -> None:
        with self.workers.doing("move", moves):
            super().move(moves)

    def set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        self.check_patterns(patterns)
        with self.workers.doing("patterns", list(patterns)):
            super().set_patterns(patterns)

    def reset(self) -> None:
        if self.workers.job.failure is None:  # otherwise there is nothing left to reset
            with self.workers.doing("reset"):
                super().reset()

    def compile(self, keys: Seq[Any], workers: int = 1, *, table_width: int = 0, moves: bool = False) -> None:
        with self.workers.doing("compile", list(keys), workers, table_width, moves):
            super().compile(keys, workers, table_width=table_width, moves=moves)
            self.workers._everyone(None)


def settings_of(given: dict[str, Any], job: Job) -> EngineConfig:
    """Returns the configuration that process 0 has sent, for this process."""
    return EngineConfig(**given, distributed=dataclasses.asdict(job.setting))
