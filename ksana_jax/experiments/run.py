"""Runs the trials of a plan one after another, skipping finished ones. Safe to kill at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax import interrupts
from ksana_jax.config import ConfigError, EngineConfig
from ksana_jax.devices.starting import use_device
from ksana_jax.errors import JobError
from ksana_jax.experiments.config import Plan, Trial, patterns_of
from ksana_jax.experiments.environment import environment
from ksana_jax.experiments.records import WHOLE, RecordFile, Shard, locked, read
from ksana_jax.experiments.tasks import task_named
from ksana_jax.files import replacing, write_atomic

if TYPE_CHECKING:
    from ksana_jax import LLM


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Counts the trials that a call of `run` skipped, finished and failed. failed: {label and seed: error}."""

    num_done: int
    num_skipped: int
    failed: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A trial that has just finished, or failed with an error. num_ended: of num_trials, including skipped ones."""

    trial: Trial
    seconds: float
    measurements: list[dict[str, Any]]
    error: str | None
    num_ended: int
    num_trials: int


class EnginePool:
    """Keeps the last engine, for reuse by trials that differ only in the attention pattern."""

    def __init__(self, plan: Plan, make_llm: Callable[..., LLM] | None = None):
        self._plan = plan
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
        llm.set_pattern(patterns if trial.config["layer_patterns"] else next(iter(patterns), None))
        if (eviction := trial.config["engine"]["kv_eviction"]) is not None:
            llm.set_kv_eviction(eviction)
        llm.clear_records()
        return llm

    def _build(self, trial: Trial) -> LLM:
        if self._make_llm is None:
            from ksana_jax import LLM

            self._make_llm = LLM
        default = dataclasses.asdict(EngineConfig())
        given = {k: v for k, v in trial.config["engine"].items() if v != default[k]}
        given.setdefault("max_repositioned_sinks", self._plan.max_repositioned_sinks(trial))
        if trial.layer_groups:
            given["pattern"] = patterns_of(trial.config)
        return self._make_llm(trial.config["model"], load_format=trial.config["load_format"], **given)


@dataclasses.dataclass
class Context:
    """Implements `tasks.base.TrialContext` for a trial of a run."""

    trial: Trial
    pool: EnginePool
    report_progress: Callable[[float], None]
    folder: Path | None = None  # the records' folder; None saves no arrays

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


def run(
    plan: Plan,
    folder: Path,
    shard: Shard = WHOLE,
    make_llm: Callable[..., LLM] | None = None,
    on_progress: Callable[[int, int, str, float], None] = lambda done, total, label, fraction: None,
    on_end: Callable[[Ended], None] = lambda ended: None,
    debug: bool = False,
) -> Outcome:
    """Runs this shard's trials of a plan into a folder and returns what happened.

    Args:
      folder: created if necessary; trials finished in it are skipped, whichever shard ran them.
      make_llm: called like `LLM`; tests pass a fake.
      on_progress: called with (trials done, trials in total, current label, fraction of the current trial done).
      on_end: called after each trial that ran.
      debug: re-raise a trial's error; otherwise the error is recorded, and the other trials continue.

    Raises:
      ConfigError: another run uses the folder, or it has a link or FIFO in place of a file.
    """
    device, distributed = _of_all(plan, "device"), _of_all(plan, "distributed")
    if distributed is not None:
        # Imported here: it imports jax.
        from ksana_jax.engine.following import start

        start(distributed, device)
    use_device(device)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, shard):
        path = folder / f"records{shard.suffix}.jsonl"
        with contextlib.closing(RecordFile(path)) as file:
            before = read(folder)
            _write_plan(plan, before.plan, file)
            _write_run(plan, folder, shard)
            mine = [t for i, t in enumerate(plan.trials) if i % shard.count == shard.index - 1]
            todo = [t for t in mine if t.id not in before.done]
            failed, pool = {}, EnginePool(plan, make_llm)
            for num_done, trial in enumerate(_ordered(plan, todo), start=len(mine) - len(todo)):
                progress = _Progress(on_progress, num_done, len(mine), trial.label)
                progress(0.0)
                began, measurements, message = time.perf_counter(), [], None
                try:
                    _run_trial(trial, Context(trial, pool, progress, folder), file, measurements)
                except Exception as error:
                    if debug or isinstance(error, JobError):  # which has ended for all trials
                        raise
                    pool.drop()
                    message = " ".join(f"{type(error).__name__}: {error}".split())
                    failed[f"{trial.label}, seed {trial.seed}"] = message
                    file.append("failed", trial=trial.id, error=message, time=time.time())
                seconds = time.perf_counter() - began
                on_end(Ended(trial, seconds, measurements, message, num_done + 1, len(mine)))
            on_progress(len(mine), len(mine), "", 0.0)
    return Outcome(len(todo) - len(failed), len(mine) - len(todo), failed)


def _of_all(plan: Plan, name: str) -> Any:
    """Returns a setting of the engine that stands for the whole process, and thus for all trials.

    Raises:
      ConfigError: they differ in it.
    """
    values = [trial.config["engine"].get(name) for trial in plan.trials]
    if others := [value for value in values if value != values[0]]:
        raise ConfigError(
            f"engine.{name} is {values[0]} in one row and {others[0]} in another: a process has one {name}: run the "
            "experiment once for each"
        )
    return values[0] if values else None


@dataclasses.dataclass(frozen=True)
class _Progress:
    on_progress: Callable[[int, int, str, float], None]
    num_done: int
    total: int
    label: str

    def __call__(self, fraction: float) -> None:
        interrupts.check()
        self.on_progress(self.num_done, self.total, self.label, fraction)


def _run_trial(trial: Trial, context: Context, file: RecordFile, measurements: list[dict[str, Any]]) -> None:
    """Runs a trial, writes its records, and adds its measurements to the list."""
    file.append(
        "start",
        trial=trial.id,
        label=trial.label,
        seed=trial.seed,
        config=trial.config,
        time=time.time(),
        environment=environment(),
    )
    began = time.perf_counter()
    for measurement in task_named(trial.config["task"]).run(context):
        file.append("measurement", trial=trial.id, **measurement)
        measurements.append(measurement)
    seconds = time.perf_counter() - began
    file.append("done", trial=trial.id, num_measurements=len(measurements), seconds=seconds, time=time.time())


def _ordered(plan: Plan, trials: list[Trial]) -> list[Trial]:
    """Groups trials by engine, so that none is built twice, or by seed; otherwise they stay in the plan's order."""
    groups = [t.seed if plan.source["interleave"] else t.engine_key for t in trials]
    order = {key: i for i, key in enumerate(dict.fromkeys(groups))}
    return [trials[i] for i in sorted(range(len(trials)), key=lambda i: order[groups[i]])]


def _write_plan(plan: Plan, last: dict[str, Any] | None, file: RecordFile) -> None:
    rows = [{"label": r.label, "point": r.point, "trials": [t.id for t in r.trials]} for r in plan.rows]
    fields = {"name": plan.name, "title": plan.title, "task": plan.task, "rows": rows}
    if last is None or any(last[k] != v for k, v in fields.items()):
        file.append("plan", **fields, time=time.time())


def _write_run(plan: Plan, folder: Path, shard: Shard) -> None:
    content = {
        "name": plan.name,
        "experiment": plan.source,
        "trials": [{"id": t.id, "label": t.label, "seed": t.seed, "config": t.config} for t in plan.trials],
        "environment": environment(),
        "shard": f"{shard.index}/{shard.count}",
    }
    write_atomic(folder / f"run{shard.suffix}.json", json.dumps(content, indent=2) + "\n")
