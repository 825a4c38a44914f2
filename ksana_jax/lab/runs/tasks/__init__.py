"""Tasks, the kinds of measurement: one file and one entry in TASKS each, or a custom class "package.module:Class"."""

from __future__ import annotations

from ksana_jax.core.config import ConfigError
from ksana_jax.core.plugins import nearest, resolve
from ksana_jax.lab.runs.tasks.base import BaseTask, Results

TASKS: dict[str, str] = {
    "perplexity": "ksana_jax.lab.runs.tasks.perplexity:Perplexity",
    "generate": "ksana_jax.lab.runs.tasks.generate:Generate",
    "compare": "ksana_jax.lab.runs.tasks.compare:Compare",
    "agreement": "ksana_jax.lab.runs.tasks.agreement:Agreement",
    "divergence": "ksana_jax.lab.runs.tasks.divergence:Divergence",
    "harness": "ksana_jax.lab.runs.tasks.harness:Harness",
    "recall": "ksana_jax.lab.runs.tasks.recall:Recall",
    "ruler": "ksana_jax.lab.runs.tasks.ruler:Ruler",
    "speculative": "ksana_jax.lab.runs.tasks.speculative:Speculative",
    "simulate": "ksana_jax.lab.runs.tasks.simulate:Simulate",
    "capacity": "ksana_jax.lab.runs.tasks.capacity:CapacitySearch",
    "route": "ksana_jax.lab.runs.tasks.route:Route",
}


def task_named(name: str) -> BaseTask:
    """Returns the task with this name, or an instance of "package.module:Class".

    Raises:
      ConfigError: there is no such task (the nearest is named), the class is not a `BaseTask`, or it is incomplete.
    """
    found = _instance(name, BaseTask)
    assert isinstance(found, BaseTask)
    return found


def results_named(name: str) -> Results:
    """Returns the reader of a task's or benchmark's measurements; raises ConfigError like `task_named`."""
    return _instance(name, Results)


def _instance(name: str, kind: type[Results]) -> Results:
    if name not in TASKS and ":" not in name:
        raise ConfigError(
            f"unknown task {name!r}; the nearest is {nearest(name, TASKS, cutoff=0.0)!r}. "
            "A task of your own is 'package.module:Class'"
        )
    # Records of a benchmark of the package have the name of its class.
    known = {name: name} if name.startswith("ksana_jax.lab.bench.") else TASKS
    found = resolve(name, known, "task")
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"task is {name!r}, which is not a subclass of ksana_jax.extend.{kind.__name__}")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"task is {name!r}, which lacks {', '.join(missing)}; see ksana_jax.extend.{kind.__name__}")
    return found()
