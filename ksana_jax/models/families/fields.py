"""Reads fields of a Hugging Face config one at a time, and collects problems. Knows no family and no files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError

# Larger numbers are mistakes or attacks: arrays or lists of that size would kill the process.
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000


class Fields:
    """A Hugging Face config with the family's defaults for absent fields.

    A getter that finds an invalid value records a problem and returns a harmless value, so that `check` can report all
    problems at once.

    Args:
      values: the parsed config.
      source: origin of the config, for error messages.
      defaults: values that the family's config class in transformers assumes for absent fields.
    """

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any]):
        self.values, self.source, self.defaults = values, source, defaults
        self.problems: list[str] = []

    def get(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.defaults.get(name)

    def problem(self, name: str, value: Any, supported: str) -> None:
        self.problems.append(f"{name} is {checks.shown(value)}; {supported}")

    def integer(self, name: str, *, most: int = MAX_INTEGER) -> int:
        """Reads a positive integer."""
        value = self.get(name)
        problem = checks.integer(name, value, 1, most)
        if problem is None:
            return value
        if value is None and name not in self.values:
            problem = f"{name} is missing, must be an integer from 1 to {most:,}"
        self.problems.append(problem)
        return 1

    def number(self, name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
        """Checks that a value is a positive finite number from low to high; `name` is for the report."""
        problem = checks.number(name, value, above=0) or checks.number(name, value, low, high)
        if problem is None:
            return float(value)
        self.problems.append(problem)
        return 1.0

    def flag(self, name: str) -> bool:
        """Reads a boolean; null is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.problem(name, value, "must be true or false")
        return value is True

    def must_be(self, name: str, allowed: tuple[Any, ...], supported: str) -> None:
        """Records a problem if a field is given and is not one of the allowed values."""
        value = self.get(name)
        if value is not None and value not in allowed:
            self.problem(name, value, supported)

    def check(self) -> None:
        """Rejects the config if there are problems.

        Raises:
          ConfigError: one line lists every problem found so far.
        """
        if self.problems:
            raise ConfigError(f"{self.source}: " + "; ".join(self.problems))
