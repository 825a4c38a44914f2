"""Worker process of a job: computes the steps that process 0 schedules.

It holds a runner for each of process 0's engines, with its own devices' part of the weights and of the pool, and the
host tier of its own heads. It has no scheduler, no requests and no text.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, NoReturn

from ksana_jax.core.compilation_cache import keep_compiled_steps
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError, JobError
from ksana_jax.core.sources import model_path
from ksana_jax.engine.device_setup import Prepared, prepare
from ksana_jax.engine.distributed.driver import OF_PROCESS_0, facts, settings_of
from ksana_jax.engine.distributed.job import Job, end_process, join
from ksana_jax.kv.moves import Moves
from ksana_jax.loading.load import open_model
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepInput, StepOutput

logger = logging.getLogger("ksana_jax")


def start(distributed: Any, device: Any = None, given: tuple[str, EngineConfig] | None = None) -> Job:
    """Starts jax in all processes of a job; returns the job in process 0, and in all of an SPMD program.

    Args:
      distributed, device: as in `EngineConfig`. given: model and settings of this process; settings must
        equal process 0's. None takes process 0's.

    Raises:
      SystemExit: this is another process, and process 0 has ended.
      ConfigError: the job cannot start; the message says why.
    """
    job = join(distributed, device)
    if not job.leads and not job.setting.spmd:
        serve_driver(job, given)
        raise SystemExit(0)
    return job


def serve_driver(job: Job, given: tuple[str, EngineConfig] | None) -> None:
    """Executes process 0's calls until it ends. If one fails, this process ends with one line.

    Args:
      given: see `start`.
    """
    engines: dict[int, _Engine] = {}
    while True:
        _, message = job.messages.get()
        if isinstance(message, dict):
            if "bye" in message:
                return
            end_process(str(job.failure))
        what, number, *rest = message
        try:
            with job.together(collective=False):
                if what == "prepare":
                    _prepare(engines, job, number, given, *rest)
                elif what == "close":
                    engines.pop(number, None)
                else:
                    getattr(engines[number], what)(*rest)
        except Exception as error:
            _fail(job, error)


def _fail(job: Job, error: Exception) -> NoReturn:
    line = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    logger.debug("a step failed", exc_info=error)
    job.wait_for_failure()
    with contextlib.suppress(JobError):
        job.send({"failed": line})
    end_process(job.failure or f"process {job.setting.process_id} failed: {line}")
    raise AssertionError


def _prepare(engines: dict[int, _Engine], job: Job, number: int, given: Any, model: str, *rest: Any) -> None:
    try:
        _check_given(given, rest[1])
        engine = engines[number] = _Engine(job, model if given is None else given[0], *rest)
    except (ValueError, OSError, NotImplementedError) as error:
        job.send({"error": " ".join(str(error).split())})
    else:
        said = engine.facts | rest[1] | {"patterns": rest[2], "num_blocks": engine.prepared.plan.num_blocks}
        job.send(said)


def _check_given(given: tuple[str, EngineConfig] | None, settings: dict[str, Any]) -> None:
    """Checks that this process has process 0's settings; digests of their files compare the models."""
    own = settings if given is None else given[1].plain()
    for name, value in settings.items():
        if name not in OF_PROCESS_0 and own[name] not in (None, "auto", value):
            raise ConfigError(f"it was given {name} {own[name]!r}, process 0 {value!r}")


class _Engine:
    """This process's part of one engine. Process 0 calls its methods."""

    def __init__(self, job: Job, model: str, load_format: Any, settings: dict[str, Any], patterns: list[Any]):
        from ksana_jax.sharding.placing import place_on

        keep_compiled_steps()
        config = settings_of(settings, job)
        placement = place_on(config.tensor_parallel_size, config.num_processes)
        path = model_path(model, weights=load_format != "dummy")
        given = {"quantization": config.quantization, "placement": placement, "num_devices": placement.num_devices}
        model_config, self._read = open_model(path, config.dtype, load_format, config.seed, **given)
        self._job = job
        self.prepared: Prepared = prepare(model_config, config, patterns)
        self.facts = facts(self.prepared, model, load_format)
        self._runner: Any = None
        # Steps whose saves to the host are not finished.
        self._submitted: list[StepOutput] = []

    def load(self, num_blocks: int) -> None:
        self._runner = self.prepared.load(self._read, num_blocks, Runner).executor
        self._job.send({"done": True})

    def step(self, step: StepInput) -> None:
        self._before(step.moves)
        output = self._runner.submit(step)
        self._submit([] if step.moves is None else [output])

    def loop(self, steps: list[StepInput]) -> None:
        self._before(steps[0].moves)
        first, *_ = self._runner.submit_together(steps)
        self._submit([] if steps[0].moves is None else [first])

    def _before(self, moves: Moves | None) -> None:
        if moves is not None and len(moves.loads):  # perhaps of blocks that an earlier step saved
            self._submit([])

    def _submit(self, outputs: list[StepOutput]) -> None:
        """Waits for older steps while the devices compute the newest ones. outputs: of steps with moves."""
        for output in self._submitted:
            output.result()
        self._submitted = outputs

    def move(self, moves: Moves) -> None:
        self._submit([])
        self._runner.move(moves)

    def patterns(self, patterns: list[Any]) -> None:
        self._runner.set_patterns(patterns)

    def reset(self) -> None:
        self._submitted = []
        self._runner.reset()

    def compile(self, keys: list[Any], workers: int, table_width: int, moves: bool) -> None:
        self._runner.compile(keys, workers, table_width=table_width, moves=moves)
        self._job.send({"done": True})
