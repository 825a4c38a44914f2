"""Runs one trial on an engine of this process and yields its records. Knows no files of records and no other trials."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import JobError
from ksana_jax.core.files import replacing
from ksana_jax.core.patterns import FULL
from ksana_jax.lab.runs.classes import package_digests
from ksana_jax.lab.runs.config import Trial
from ksana_jax.lab.runs.environment import environment
from ksana_jax.lab.runs.machine_load import Load
from ksana_jax.lab.runs.models import model_config, reader_notes
from ksana_jax.lab.runs.patterns import layer_groups, patterns_of
from ksana_jax.lab.runs.recorded_results import summary_of
from ksana_jax.lab.runs.records import record_line
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.tasks.compression import facts_of
from ksana_jax.methods.presets import read_patterns

if TYPE_CHECKING:
    from ksana_jax import LLM

# A kind of line of the records, and its fields except the trial's id; see `records`.
Record = tuple[str, dict[str, Any]]


class EnginePool:
    """Keeps the last engine, for reuse by trials that differ only in the attention pattern.

    Args:
      num_sinks: returns the maximum number of repositioned sinks in any trial that shares a trial's engine.
      make_llm: called like `LLM`; None is `LLM`.
    """

    def __init__(self, num_sinks: Callable[[Trial], int], make_llm: Callable[..., LLM] | None = None):
        self._num_sinks = num_sinks
        self._make_llm = make_llm
        self._key: str | None = None
        self._llm: LLM | None = None

    def drop(self) -> None:
        """Drops the engine after a trial failed on it, so that the next trial gets a clean one."""
        self._llm, self._key = None, None
        gc.collect()  # frees the old pool before a new one is allocated

    def get(self, trial: Trial) -> LLM:
        """Returns the trial's engine, idle, with its pattern set and its step records cleared."""
        patterns = patterns_of(trial.config)
        if self._llm is None or self._key != trial.engine_key:
            self.drop()
            self._llm, self._key = self._build(trial), trial.engine_key
        llm = self._llm
        assert llm is not None
        # None is the model's own.
        llm.set_pattern(patterns if len(patterns) > 1 else next(iter(patterns), None))
        if (eviction := trial.config["engine"]["kv_eviction"]) is not None:
            llm.set_kv_eviction(eviction)
        llm.clear_records()
        return llm

    def _build(self, trial: Trial) -> LLM:
        if self._make_llm is None:
            from ksana_jax import LLM

            self._make_llm = LLM
        given = engine_settings(trial, self._num_sinks(trial))
        return self._make_llm(trial.config["model"], load_format=trial.config["load_format"], **given)


def engine_settings(trial: Trial, num_sinks: int) -> dict[str, Any]:
    """Returns the keywords of `LLM` for a trial's engine. num_sinks: see `EnginePool`."""
    default = dataclasses.asdict(EngineConfig())
    given = {k: v for k, v in trial.config["engine"].items() if v != default[k]}
    given.setdefault("max_repositioned_sinks", num_sinks)
    if layer_groups(trial.config):
        # In one group, a pool for full attention has room for any pattern.
        patterns = patterns_of(trial.config)
        given["pattern"] = patterns if len(patterns) > 1 else FULL
    return given


def planned_bytes(trial: Trial, num_sinks: int) -> int:
    """Returns the bytes of weights and KV pool of a trial's engine, without reading weights.

    Raises:
      ConfigError: there cannot be such an engine, for instance because its memory does not fit.
    """
    from ksana_jax.engine.device_setup import prepare

    given, model = engine_settings(trial, num_sinks), model_config(trial.config["model"])
    patterns = read_patterns(given.pop("pattern", None), model)
    plan = prepare(model, EngineConfig(**given).for_model(model, patterns), patterns).plan
    return plan.weights_bytes + plan.pool_copies * plan.pool_bytes


@dataclasses.dataclass
class Context:
    """Implements `tasks.base.TrialContext` for a trial of a run."""

    trial: Trial
    pool: EnginePool
    report_progress: Callable[[float], None]
    folder: Path | None = None  # for arrays; None saves none

    def progress(self, fraction: float) -> None:
        self.report_progress(fraction)

    @property
    def config(self) -> dict[str, Any]:
        return self.trial.config

    @property
    def seed(self) -> int:
        return self.trial.seed

    @property
    def llm(self) -> LLM:
        return self.pool.get(self.trial)

    def save(self, name: str, **arrays: np.ndarray) -> str:
        file_name = f"{self.trial.id}.{name}.npz"
        if self.folder is not None:
            with replacing(self.folder / file_name) as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
        return file_name


def attempt(context: Context, debug: bool = False) -> Iterator[Record]:
    """Runs a trial and yields its records as they come: start, measurements, and done or failed.

    Args:
      debug: raise the trial's error instead of yielding `failed` and dropping the engine.

    Raises:
      JobError: other processes of a distributed engine are lost.
    """
    trial = context.trial
    start = {"label": trial.label, "seed": trial.seed, "config": trial.config, "time": time.time()}
    start |= facts_of(trial.config) | {"notes": reader_notes([trial.config])}
    start["classes"] = package_digests(trial.config)
    yield "start", {**start, "environment": environment()}
    load = Load()
    began, task, measurements = time.perf_counter(), task_named(trial.config["task"]), []
    try:
        for measurement in task.run(context):
            record_line("measurement", trial=trial.id, **measurement)  # what cannot be written is an error of the trial
            yield "measurement", measurement
            measurements.append(measurement)
    except Exception as error:
        if debug or isinstance(error, JobError):  # which has ended for all trials
            raise
        context.pool.drop()
        yield "failed", {"error": " ".join(f"{type(error).__name__}: {error}".split()), "time": time.time()}
    else:
        ended = {"num_measurements": len(measurements), "seconds": time.perf_counter() - began, "time": time.time()}
        yield "done", ended | {"load": load.read()} | summary_of(task, measurements)
