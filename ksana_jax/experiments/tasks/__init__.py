"""What can be measured: one file a task, one line in TASKS; or a class of the user's own, as "package.module:Class"."""

from __future__ import annotations

from ksana_jax.config import ConfigError
from ksana_jax.experiments.tasks.base import BaseTask
from ksana_jax.plugins import nearest, resolve

TASKS: dict[str, str] = {
    "perplexity": "ksana_jax.experiments.tasks.perplexity:Perplexity",
    "generate": "ksana_jax.experiments.tasks.generate:Generate",
    "memory_sharing": "ksana_jax.experiments.tasks.memory_sharing:MemorySharing",
    "prefix_cache": "ksana_jax.experiments.tasks.prefix_cache:PrefixCache",
    "host_embedding": "ksana_jax.experiments.tasks.host_embedding:HostEmbedding",
}


def task_named(name: str) -> BaseTask:
    """The task of that name, or of the class that "package.module:Class" names.

    Raises:
      ConfigError: there is none, with the nearest name; or the class is no `BaseTask`, or lacks a part of one.
    """
    if name not in TASKS and ":" not in name:
        raise ConfigError(
            f"unknown task {name!r}; the nearest is {nearest(name, TASKS, cutoff=0.0)!r}. "
            "A task of your own is 'package.module:Class'"
        )
    found = resolve(name, TASKS, "task")
    if not (isinstance(found, type) and issubclass(found, BaseTask)):
        raise ConfigError(f"task is {name!r}, which is not a subclass of ksana_jax.experiments.tasks.base.BaseTask")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(
            f"task is {name!r}, which lacks {', '.join(missing)}; see ksana_jax.experiments.tasks.base.BaseTask"
        )
    return found()
