"""What can be measured: one file a task, one line in TASKS."""

from __future__ import annotations

import difflib
from importlib import import_module

from experiments.tasks.base import Task
from ksana_jax.config import ConfigError

TASKS: dict[str, str] = {
    "perplexity": "experiments.tasks.perplexity:Perplexity",
    "generate": "experiments.tasks.generate:Generate",
    "memory_sharing": "experiments.tasks.memory_sharing:MemorySharing",
    "prefix_cache": "experiments.tasks.prefix_cache:PrefixCache",
    "host_embedding": "experiments.tasks.host_embedding:HostEmbedding",
}


def task_named(name: str) -> Task:
    """The task of that name.

    Raises:
      ConfigError: there is none, with the nearest name.
    """
    if name not in TASKS:
        nearest = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown task {name!r}; the nearest is {nearest!r}")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(import_module(module), attribute)()
