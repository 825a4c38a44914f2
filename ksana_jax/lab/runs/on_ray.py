"""Spreads trials over a Ray cluster: one actor for each place runs trials one after another. Writes no records."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.engine.distributed.ray_connection import AUTO, connected
from ksana_jax.engine.distributed.ray_places import Place, Resources, places_of
from ksana_jax.lab.runs.config import Plan, Trial
from ksana_jax.lab.runs.environment import host_environment
from ksana_jax.lab.runs.run import of_all
from ksana_jax.lab.runs.trial_runner import Answer, Assignment, TrialRunner, TrialSender
from ksana_jax.lab.runs.trials import Record

MAX_RETRIES = 3  # of a trial whose worker process was lost, as Ray has for tasks
MAX_STARTS = 5  # of a worker process that is lost before it answers, in a row on one place
POLL_S = 0.5
REFRESH_S = 2.0  # between looks for new nodes, and starts of lost workers
PATIENCE_S = 60.0  # before a warning that no worker has started


@dataclasses.dataclass(frozen=True)
class OnRay:
    """A cluster to run trials on. address: see `ray_connection.connected`. resources: of one trial."""

    address: str = AUTO
    resources: Resources = dataclasses.field(default_factory=Resources)

    @contextlib.contextmanager
    def executor(self, plan: Plan, debug: bool = False) -> Iterator[RayTrials]:
        """Connects to the cluster while the context is open; see `RayTrials`."""
        with connected(self.address) as ray:
            yield RayTrials(plan, ray, self.resources, debug)


@dataclasses.dataclass
class _Worker:
    """An actor. answer: reference of its running call. trial: None while it starts, and while it is idle."""

    place: Place
    actor: Any
    answer: Any = None
    trial: Trial | None = None
    engine: str | None = None


class _Queue:
    """Trials that wait. in_order: take them strictly in their order, not by the engines that workers have."""

    def __init__(self, trials: Sequence[Trial], in_order: bool):
        self._trials = list(trials)
        self._engines = {} if in_order else {trial.id: trial.engine_key for trial in trials}

    def __len__(self) -> int:
        return len(self._trials)

    def engine(self, trial: Trial) -> str | None:
        return self._engines.get(trial.id)

    def put_back(self, trial: Trial) -> None:
        self._trials.insert(0, trial)

    def take(self, engine: str | None, others: set[str | None]) -> Trial | None:
        """Takes the next trial for a worker: for its engine, or else for an engine that no other worker has."""
        ranks = [0 if self.engine(t) == engine else 1 + (self.engine(t) in others) for t in self._trials]
        return self._trials.pop(ranks.index(min(ranks))) if ranks else None


class RayTrials:
    """Runs trials on the nodes of a cluster that this process is connected to; implements `run.Executor`.

    A worker that is lost with its process or its node costs the trial that it ran one of MAX_RETRIES attempts; another
    worker runs it. Nodes that join are used.

    Args:
      ray: the module, connected; see `engine.distributed.ray_connection.connected`.
      resources: of one trial.
      debug: raise the error of a trial.
    """

    def __init__(self, plan: Plan, ray: Any, resources: Resources, debug: bool = False):
        self._plan, self._ray, self._resources, self._debug = plan, ray, resources, debug
        sizes = [trial.config["engine"]["tensor_parallel_size"] for trial in plan.trials]
        self._num_devices = max(sizes, default=1)
        self._workers: dict[tuple[str, int], _Worker] = {}
        self._lost: Counter[str] = Counter()  # by trial
        self._failed_starts: Counter[tuple[str, int]] = Counter()

    def environment(self) -> dict[str, Any]:
        of_all(self._plan, "device")
        if of_all(self._plan, "distributed") is not None:
            raise ConfigError("engine.distributed: a trial on a Ray cluster has an engine in one process")
        places = self._places()
        return {
            **host_environment(),
            "ray": self._ray.__version__,
            "places": [{"num_cpus": place.num_cpus, "num_gpus": place.num_gpus} for place in places],
        }

    def attempts(
        self, trials: Sequence[Trial], folder: Path, on_progress: Callable[[str, float], None]
    ) -> Generator[tuple[Trial, Record]]:
        queue, looked, began = _Queue(trials, self._plan.source["interleave"]), 0.0, time.monotonic()
        has_worked = False
        try:
            while queue or self._running():
                if time.monotonic() - looked > REFRESH_S:
                    self._start_workers(len(queue) + len(self._running()))
                    looked = time.monotonic()
                for worker in [w for w in self._workers.values() if w.answer is None]:
                    self._assign(worker, queue)
                self._show(on_progress)
                for worker in self._answered():
                    trial = worker.trial
                    answer = self._answer_of(worker, queue)
                    if trial is None:
                        has_worked = has_worked or answer is not None
                    elif answer is not None:
                        yield from self._records(trial, worker, answer, folder)
                    else:
                        looked = 0.0  # another worker is started at once
                        if self._lost[trial.id] > MAX_RETRIES:
                            yield trial, ("failed", {"error": self._why_lost(trial, worker), "time": time.time()})
                if not has_worked and time.monotonic() - began > PATIENCE_S:
                    has_worked = True  # says so once
                    warnings.warn("no trial has started: the cluster's CPUs or GPUs are taken by others", stacklevel=2)
        finally:
            for worker in list(self._workers.values()):
                self._drop(worker)

    def _places(self) -> list[Place]:
        places = places_of(self._ray.nodes(), self._resources, self._num_devices)
        if not places:
            raise ConfigError("the Ray cluster has no node left; repeat the command to resume")
        return places

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.trial is not None]

    def _start_workers(self, num_wanted: int) -> None:
        for place in self._places():
            key = place.node_id, place.index
            if key not in self._workers and len(self._workers) < num_wanted:
                self._workers[key] = self._started(place)

    def _started(self, place: Place) -> _Worker:
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            NodeAffinitySchedulingStrategy,
        )

        made = self._ray.remote(TrialRunner)
        options = {"num_cpus": place.num_cpus, "num_gpus": place.num_gpus, "max_restarts": 0}
        here = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        actor = made.options(**options, scheduling_strategy=here).remote(
            TrialSender.here(), place.cores, place.hides_gpus
        )
        return _Worker(place, actor, answer=actor.begin.remote())

    def _assign(self, worker: _Worker, queue: _Queue) -> None:
        """Gives an idle worker its next trial; without one, it ends, and frees its place in the cluster."""
        others = {other.engine for other in self._workers.values() if other is not worker}
        trial = queue.take(worker.engine, others)
        if trial is None:
            return self._drop(worker)
        worker.trial, worker.engine = trial, queue.engine(trial)
        given = Assignment(trial, self._plan.max_repositioned_sinks(trial), self._debug)
        worker.answer = worker.actor.run.remote(given)

    def _answered(self) -> list[_Worker]:
        """Waits for an answer, for at most POLL_S; returns the workers that gave one or were lost."""
        busy = {worker.answer: worker for worker in self._workers.values() if worker.answer is not None}
        if not busy:
            time.sleep(POLL_S)
            return []
        ready, _ = self._ray.wait(list(busy), num_returns=len(busy), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(list(busy), timeout=POLL_S)
        return [busy[reference] for reference in ready]

    def _answer_of(self, worker: _Worker, queue: _Queue) -> Any:
        """Returns a worker's answer; None if it was lost, and then its trial is in the queue again or lost for good.

        Raises:
          ConfigError: the worker's node cannot run the trial.
        """
        errors, trial, place = self._ray.exceptions, worker.trial, worker.place
        try:
            answer = self._ray.get(worker.answer)
        except errors.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(f"node {place.node}: {error.cause}") from None
            raise
        except errors.RayError as error:
            self._drop(worker)
            if trial is None:
                self._count_failed_start(place, error)
            else:
                self._lost[trial.id] += 1
                if self._lost[trial.id] <= MAX_RETRIES:
                    warnings.warn(f"{trial.label}: its worker on {place.node} was lost; another runs it", stacklevel=2)
                    queue.put_back(trial)
            return None
        worker.answer = worker.trial = None
        return answer

    def _count_failed_start(self, place: Place, error: Exception) -> None:
        key = place.node_id, place.index
        self._failed_starts[key] += 1
        said = " ".join(str(error).split())
        if "No module named" in said:
            raise ConfigError(
                f"node {place.node}: ksana_jax cannot be imported there: {said[said.rindex('No module named') :]}; "
                "install it on every node: pip install 'ksana-jax[ray]'"
            )
        if self._failed_starts[key] >= MAX_STARTS:
            raise ConfigError(f"node {place.node}: {MAX_STARTS} workers ended before they had started: {said}")

    def _records(self, trial: Trial, worker: _Worker, answer: Answer, folder: Path) -> Iterator[tuple[Trial, Record]]:
        for text in answer.warnings:
            warnings.warn(f"{worker.place.node}: {text}", stacklevel=2)
        for name, content in answer.arrays.items():
            write_atomic(folder / Path(name).name, content)
        for record in answer.records:
            yield trial, record

    def _why_lost(self, trial: Trial, worker: _Worker) -> str:
        return (
            f"its worker process ended {self._lost[trial.id]} times, killed, crashed or out of memory; the last was on "
            f"{worker.place.node}"
        )

    def _show(self, on_progress: Callable[[str, float], None]) -> None:
        """Reports the running trials."""
        labels = [worker.trial.label for worker in self._running() if worker.trial is not None]
        if labels:
            on_progress(labels[0] + f" and {len(labels) - 1} more" * (len(labels) > 1), 0.0)

    def _drop(self, worker: _Worker) -> None:
        """Ends a worker's process, or forgets one that is lost."""
        del self._workers[worker.place.node_id, worker.place.index]
        self._ray.kill(worker.actor)
