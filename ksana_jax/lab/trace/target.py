"""Target of a trace: the words of a command. Knows experiments by name, no engine."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments.config import load

# Commands that build engines in this process.
TRACEABLE = ("run", "bench", "generate", "chat", "inspect", "lm-eval")


def command_line(target: Sequence[str], commands: Collection[str], out: Path) -> list[str]:
    """Returns the words of the `ksana` command to run for a target.

    Args:
      target: the words of a command, or an experiment and its overrides, which `run` runs into a folder of `out`.
      commands: that exist.

    Raises:
      ConfigError: there is neither a command nor an experiment of that name, or it builds no engine.
    """
    first, *others = target
    if first in TRACEABLE and first != "run":
        return list(target)
    if first in commands and first != "run":
        raise ConfigError(f"ksana {first} builds no engine: trace an experiment or one of {', '.join(TRACEABLE)}")
    words = others if first == "run" else list(target)
    experiment = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if experiment:
        load(experiment[0], experiment[1:])  # says what is wrong before anything is written
    return ["run", *words, "--out", str(out / "run")]
