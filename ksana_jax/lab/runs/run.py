"""Runs the trials of a plan, skipping finished ones, and writes their records. Safe to kill at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.plugins import trusting
from ksana_jax.devices.starting import use_device
from ksana_jax.lab.runs.config import Plan, Trial
from ksana_jax.lab.runs.environment import environment
from ksana_jax.lab.runs.models import reader_notes
from ksana_jax.lab.runs.recorded_results import table_of
from ksana_jax.lab.runs.records import WHOLE, RecordFile, Shard, locked, read
from ksana_jax.lab.runs.report import result_rows
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.trials import Context, EnginePool, Record, attempt

if TYPE_CHECKING:
    from ksana_jax import LLM


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Counts the trials that a call of `run` skipped, finished and failed. failed: {label and seed: error}."""

    num_done: int
    num_skipped: int
    failed: dict[str, str]


@dataclasses.dataclass(frozen=True)
class EndedTrial:
    """A trial that has just finished, or failed with an error. num_ended: of num_trials, including skipped ones."""

    trial: Trial
    seconds: float
    measurements: list[dict[str, Any]]
    error: str | None
    num_ended: int
    num_trials: int


class Callbacks(TypedDict, total=False):
    """Callback arguments of `run`.

    on_begin: called once with the trials that will run. on_progress: called with (trials done, trials in total, the
    running trials, how many trials' worth of them is done). on_end: called after each trial that ran.
    """

    on_begin: Callable[[Sequence[Trial]], None]
    on_progress: Callable[[int, int, str, float], None]
    on_end: Callable[[EndedTrial], None]


class TrialExecutor(Protocol):
    """Runs trials: `LocalTrials` in this process, `on_ray.RayTrials` on a cluster."""

    def environment(self) -> dict[str, Any]:
        """Describes the run for run.json; called first. The records have the environment of each trial."""
        ...

    def attempts(
        self, trials: Sequence[Trial], folder: Path, on_progress: Callable[[str, float], None]
    ) -> Generator[tuple[Trial, Record]]:
        """Runs trials and yields their records; one trial's in order, from start to done or failed.

        Args:
          trials: in their starting order.
          folder: for arrays that trials save.
          on_progress: called with the running trials and how many trials' worth of them is done.
        """
        ...


class LocalTrials:
    """Runs trials one after another in this process. make_llm and debug: see `run`."""

    def __init__(self, plan: Plan, make_llm: Callable[..., LLM] | None = None, debug: bool = False):
        self._plan, self._debug = plan, debug
        self._pool = EnginePool(plan.max_repositioned_sinks, make_llm)

    def environment(self) -> dict[str, Any]:
        device, distributed = of_all(self._plan, "device"), of_all(self._plan, "distributed")
        if distributed is not None:
            # Imported here: it imports jax.
            from ksana_jax.engine.distributed.worker import start

            start(distributed, device)
        use_device(device)
        return environment()

    def attempts(
        self, trials: Sequence[Trial], folder: Path, on_progress: Callable[[str, float], None]
    ) -> Generator[tuple[Trial, Record]]:
        from ksana_jax.lab.runs.stalls import stalls_logged  # it imports jax, which `environment` prepares

        with stalls_logged():
            for trial in trials:
                progress = _Progress(trial.label, on_progress)
                progress(0.0)
                for record in attempt(Context(trial, self._pool, progress, folder), self._debug):
                    yield trial, record


@dataclasses.dataclass(frozen=True)
class _Progress:
    label: str
    on_progress: Callable[[str, float], None]

    def __call__(self, fraction: float) -> None:
        self.on_progress(self.label, fraction)


def run(
    plan: Plan,
    folder: Path,
    shard: Shard = WHOLE,
    make_llm: Callable[..., LLM] | None = None,
    on_begin: Callable[[Sequence[Trial]], None] = lambda trials: None,
    on_progress: Callable[[int, int, str, float], None] = lambda done, total, label, fraction: None,
    on_end: Callable[[EndedTrial], None] = lambda ended: None,
    debug: bool = False,
    executor: TrialExecutor | None = None,
) -> Outcome:
    """Runs this shard's trials of a plan into a folder and returns what happened.

    Args:
      folder: created if necessary; trials finished in it are skipped, whichever shard ran them.
      make_llm: called like `LLM`; tests pass a fake.
      on_begin, on_progress, on_end: see `Callbacks`.
      debug: re-raise a trial's error; otherwise the error is recorded, and the other trials continue.
      executor: runs the trials; None is this process.

    Raises:
      ConfigError: another run uses the folder, or it has a link or FIFO instead of a file.
    """
    executor = executor or LocalTrials(plan, make_llm, debug)
    about = executor.environment()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, shard):
        path = folder / f"records{shard.suffix}.jsonl"
        with contextlib.closing(RecordFile(path)) as file:
            with trusting(own_names(plan)):
                before = read(folder)
            _write_plan(plan, before.plan, file)
            _write_run(plan, about, folder, shard)
            mine = shard.part_of(plan.trials)
            todo = [t for t in mine if t.id not in before.done]
            failed, num_ended = {}, len(mine) - len(todo)
            on_begin(todo)
            running: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}

            def progress(label: str, fraction: float) -> None:
                on_progress(num_ended, len(mine), label, fraction)

            attempts = executor.attempts(_ordered(plan, todo), folder, progress)
            with contextlib.closing(attempts):
                for trial, (kind, fields) in attempts:
                    file.append(kind, trial=trial.id, **fields)
                    if kind == "start":
                        running[trial.id] = fields, []
                    elif kind == "measurement":
                        running[trial.id][1].append(fields)
                    else:
                        start, measurements = running.pop(trial.id, (fields, []))  # a lost worker reports no start
                        error = fields["error"] if kind == "failed" else None
                        if error is not None:
                            failed[f"{trial.label}, seed {trial.seed}"] = error
                        num_ended += 1
                        seconds = fields["time"] - start["time"]
                        on_end(EndedTrial(trial, seconds, measurements, error, num_ended, len(mine)))
            on_progress(len(mine), len(mine), "", 0.0)
            if todo:
                with trusting(own_names(plan)):
                    _write_table(plan, folder, file)
    return Outcome(len(todo) - len(failed), len(mine) - len(todo), failed)


def own_names(plan: Plan) -> set[str]:
    """Returns the names of own code in a plan's settings, which the user trusts."""
    return {name for trial in plan.trials for name in (trial.config["task"], *trial.config.get("code", {}))}


def of_all(plan: Plan, name: str) -> Any:
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


def _ordered(plan: Plan, trials: list[Trial]) -> list[Trial]:
    """Groups trials by engine, so that none is built twice, or by seed; otherwise they stay in the plan's order."""
    groups = [t.seed if plan.source["interleave"] else t.engine_key for t in trials]
    order = {key: i for i, key in enumerate(dict.fromkeys(groups))}
    return [trials[i] for i in sorted(range(len(trials)), key=lambda i: order[groups[i]])]


def _write_plan(plan: Plan, last: dict[str, Any] | None, file: RecordFile) -> None:
    rows = [{"label": r.label, "point": r.point, "trials": [t.id for t in r.trials]} for r in plan.rows]
    fields = {"name": plan.name, "title": plan.title, "task": plan.task, "rows": rows}
    fields |= {key: plan.source[key] for key in ("baseline", "pivot") if plan.source[key]}
    if last is None or any(last.get(k) != v for k, v in fields.items()):
        number = 0 if last is None else last.get("number", 0) + 1
        file.append("plan", **fields, number=number, time=time.time())


def _write_table(plan: Plan, folder: Path, file: RecordFile) -> None:
    records, task = read(folder), task_named(plan.task)
    try:
        table = table_of(task, result_rows(records, task))
    except Exception:  # of the task's code: the report says what is wrong
        return
    if records.table is None or any(records.table.get(name) != value for name, value in table.items()):
        file.append("table", task=plan.task, **table)


def _write_run(plan: Plan, about: dict[str, Any], folder: Path, shard: Shard) -> None:
    content = {
        "name": plan.name,
        "experiment": plan.source,
        "notes": reader_notes(t.config for t in plan.trials),
        "trials": [{"id": t.id, "label": t.label, "seed": t.seed, "config": t.config} for t in plan.trials],
        "environment": about,
        "shard": f"{shard.index}/{shard.count}",
    }
    write_atomic(folder / f"run{shard.suffix}.json", json.dumps(content, indent=2) + "\n")
