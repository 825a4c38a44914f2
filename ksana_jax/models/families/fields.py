"""Reads fields of a Hugging Face config one at a time, and collects problems. Knows no family and no files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError

# Larger numbers are mistakes or attacks: arrays or lists of that size would kill the process.
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = MAX_HEADS = 10_000
# All layers together; the files of a model may have as many tensors.
MAX_EXPERTS = 100_000


class Fields:
    """A Hugging Face config with the family's defaults for absent fields.

    A getter that finds an invalid value records a problem and returns a harmless value, so that `check` can report all
    problems at once.

    Args:
      values: the parsed config.
      source: origin of the config, for error messages.
      defaults: values that the family's config class in transformers assumes for absent fields. One that follows from
        other fields is a function of these Fields, which then also serves null.
      names: of fields in this config, by their usual names; None for fields that it lacks.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        defaults: Mapping[str, Any],
        names: Mapping[str, str | None] | None = None,
    ):
        self.values, self.source, self.defaults, self.names = values, source, defaults, names or {}
        self.problems: list[str] = []
        for usual, name in self.names.items():
            # Some versions of transformers write both names.
            if values.get(usual) not in (None, values.get(name or "")) and usual not in self.names.values():
                wanted = "must be absent" if name is None else f"is named {name} here"
                self.problems.append(f"{usual} is {checks.shown(values[usual])}; {wanted}")

    def get(self, name: str) -> Any:
        key, default = self.names.get(name, name), self.defaults.get(name)
        value = self.values[key] if key is not None and key in self.values else default
        if not callable(default):
            return value
        return default(self) if value is None or value is default else value

    def shown(self, name: str) -> str:
        """Returns the name of a field in this config, for messages."""
        return self.names.get(name) or name

    def problem(self, name: str, value: Any, supported: str) -> None:
        self.problems.append(f"{self.shown(name)} is {checks.shown(value)}; {supported}")

    def integer(self, name: str, *, most: int = MAX_INTEGER) -> int:
        """Reads a positive integer."""
        value = self.get(name)
        shown = self.shown(name)
        problem = checks.integer(shown, value, 1, most)
        if problem is None:
            return value
        if value is None and shown not in self.values:
            problem = f"{shown} is missing, must be an integer from 1 to {most:,}"
        self.problems.append(problem)
        return 1

    def number(self, name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
        """Checks that a value is a positive finite number from low to high; `name` is for the report."""
        name = self.shown(name)
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
