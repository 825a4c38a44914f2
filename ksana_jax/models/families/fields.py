"""Reads one field of a Hugging Face config at a time and collects what is wrong. Knows no family and no files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ksana_jax import checks
from ksana_jax.config import ConfigError

# Beyond these a number is a mistake or an attack, and arrays or lists of that size would end the process.
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000


class Fields:
    """A config as its family understands it: what is given, else what Hugging Face assumes.

    A getter that finds an impossible value notes a problem and returns a harmless one, so that `check` can report
    every problem at once.

    Args:
      values: the parsed config.
      source: where it comes from, for error messages.
      defaults: what the family's config class in transformers assumes for fields that are absent.
    """

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any]):
        self.values, self.source, self.defaults = values, source, defaults
        self.problems: list[str] = []

    def get(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.defaults.get(name)

    def problem(self, name: str, value: Any, supported: str) -> None:
        self.problems.append(f"{name} is {checks.shown(value)}; {supported}")

    def integer(self, name: str, *, most: int = MAX_INTEGER) -> int:
        """A positive integer."""
        value = self.get(name)
        problem = checks.integer(name, value, 1, most)
        if problem is None:
            return value
        if value is None and name not in self.values:
            problem = f"{name} is missing, must be an integer from 1 to {most:,}"
        self.problems.append(problem)
        return 1

    def number(self, name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
        """A positive finite number from low to high, given by the caller under the name to report."""
        problem = checks.number(name, value, above=0) or checks.number(name, value, low, high)
        if problem is None:
            return float(value)
        self.problems.append(problem)
        return 1.0

    def flag(self, name: str) -> bool:
        """True or false; null is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.problem(name, value, "must be true or false")
        return value is True

    def must_be(self, name: str, allowed: tuple[Any, ...], supported: str) -> None:
        """Notes a problem where a field is given and none of the allowed values."""
        value = self.get(name)
        if value is not None and value not in allowed:
            self.problem(name, value, supported)

    def check(self) -> None:
        """Refuses the config if any problem was noted.

        Raises:
          ConfigError: one line with every problem noted so far.
        """
        if self.problems:
            raise ConfigError(f"{self.source}: " + "; ".join(self.problems))
