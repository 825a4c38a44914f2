"""Names the implementation of each operator that an engine uses, and chooses by name; `ops.table` has them. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest

# Implementations of each operator that has several, in order of preference.
IMPLEMENTATION_NAMES = {
    "attention": ("hopper", "triton", "native", "xla"),
    "linear": ("packed", "mixed", "native", "hopper", "xla"),
    "norm": ("native", "xla"),
    "recurrent": ("native", "xla"),
}
# Those that compute each row of a step separately, and "auto", which then takes one of them.
ROW_BY_ROW = {
    "attention": ("auto", "native"),
    "linear": ("auto", "packed", "native"),
    "norm": ("auto", "native"),
    "recurrent": ("auto", "native"),
}
# Entry points of this group add implementations of attention from other packages, each under its own name.
ATTENTION_GROUP = "ksana_jax.attention"


@dataclasses.dataclass(frozen=True)
class OperatorSettings:
    """Names an implementation of each operator, or says how "auto" chooses among those that serve.

    Args:
      prefer: "speed" takes the first that serves in the order of preference; "agreement" the pair of attention and
        products with weights that agrees longest with a float32 reference, and the fastest of those that agree as long,
        as `ksana align --choose` measured for this model's shape, dtype and KV on this device; the path of that
        command's .json file reads the measurements from it.
      attention: paged attention and the write of keys and values. On a CPU "native" is C++, compiled on first use and
        cached; without a C++ compiler "xla" serves.
      linear: products with weights. On a CPU "packed" repacks weights when they are loaded and computes all that
        a layer does except attention in two calls of C++, "native" uses them unchanged, "mixed" is native for up to
        64 rows of a step and XLA's for more. With "packed" and "native", a row's result is the same whatever the other
        rows. On a Hopper GPU "hopper" computes, in bfloat16 and for up to 64 tokens of a step, products together with
        norms, gated activations and residuals in one kernel each, where that is faster by its bytes; XLA the others.
      norm: norms, where "packed" does not compute them with its products. On a CPU "native" is C++.
      recurrent: recurrent layers between their products with weights. On a CPU "native" is C++, which updates states in
        their pool. With either, numbers do not depend on how steps cut a text.
    """

    prefer: str = "speed"
    attention: str = "auto"
    linear: str = "auto"
    norm: str = "auto"
    recurrent: str = "auto"

    def __post_init__(self):
        checks.require(*map(self._problem, IMPLEMENTATION_NAMES), error=ConfigError)
        if self.prefer not in ("speed", "agreement") and not str(self.prefer).endswith(".json"):
            raise ConfigError(
                f"operators.prefer is {self.prefer!r}, must be speed, agreement or the path of a .json file"
            )

    def _problem(self, operator: str) -> str | None:
        name, known = getattr(self, operator), ("auto", *IMPLEMENTATION_NAMES[operator])
        if operator == "attention" and name not in known:
            known += tuple(point.name for point in entry_points(group=ATTENTION_GROUP))
        return checks.one_of(f"operators.{operator}", name, known)

    def not_row_by_row(self, block_size: int) -> list[str]:
        """Returns the settings by which a request's numbers depend on how it is served: these, and the block size."""
        found = [
            f"operators.{name} {value!r}, must be {' or '.join(names)}"
            for name, names in ROW_BY_ROW.items()
            if (value := getattr(self, name)) not in names
        ]
        if block_size % 16:
            found.append(f"block_size {block_size}, must be a multiple of 16")
        return found

    @classmethod
    def of(cls, given: Any) -> OperatorSettings:
        """Returns settings from a mapping of their fields, or as they are; None gives the defaults.

        Raises:
          ConfigError: a key is unknown, with the nearest one, or there is no implementation of a name.
        """
        if isinstance(given, cls):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"operators is {given!r:.60}, must be a mapping such as {{'attention': 'xla'}}")
        names = [field.name for field in dataclasses.fields(cls)]
        for key in given or {}:
            if key not in names:
                raise ConfigError(
                    f"operators has no key {key!r}, the nearest is {nearest(str(key), names, cutoff=0.0)!r}"
                )
        return cls(**(given or {}))


AUTO = OperatorSettings()


def first_serving(operator: str, name: str, rows: Sequence[Any], unsupported: Callable[[Any], str | None]) -> Any:
    """Returns the first implementation of an operator that serves, or the one with the given name.

    Args:
      rows: implementations with a `name`, in order of preference. unsupported: why one of them does not serve, or None.

    Raises:
      ValueError: there is none of that name, or it does not serve.
    """
    problem = f"is {name!r}, must be auto or one of {', '.join(row.name for row in rows)}"
    for row in rows:
        if name in ("auto", row.name):
            if (reason := unsupported(row)) is None:
                return row
            problem = f"{row.name!r}: {reason}"
    raise ValueError(f"operators.{operator} {problem}")
