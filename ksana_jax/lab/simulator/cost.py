"""Cost models: seconds of steps by their sizes, read from JSON files that name the source of their times."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import resolve
from ksana_jax.lab.simulator.move_cost import MoveCost, mapping_of, read_moves
from ksana_jax.lab.simulator.step_size import StepSize

FORMAT = 1
# Seed for the noise of steps, as numpy's default_rng takes it; None for no noise.
Seed: TypeAlias = int | Sequence[int] | None
# Share of the time of a run that steps of unseen shapes may take.
MOST_EXTRAPOLATED = 0.01


@dataclasses.dataclass(frozen=True)
class HostCost:
    """Seconds of the host for a step, to schedule, build and report it.

    step_s: of any step. row_s: for each of its rows. chunk_s: more, of a step with chunks.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    chunk_s: float = 0.0

    def seconds(self, size: StepSize) -> float:
        return self.step_s + self.row_s * size.num_rows + (self.chunk_s if size.num_chunked else 0.0)

    def times(self, factor: float) -> HostCost:
        """Returns the costs of a host that takes `factor` times as long."""
        return HostCost(self.step_s * factor, self.row_s * factor, self.chunk_s * factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Base of all models of costs: the host's part, moves, and the source of the numbers.

    provenance: plain values such as the file of records, the device, and errors on steps that were held out;
    {"measured": False} for a model that was not measured.
    """

    host: HostCost = HostCost()
    move: MoveCost = dataclasses.field(default_factory=MoveCost)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def seconds(self, size: StepSize) -> float:
        """Returns the device's seconds for a step, without its moves."""
        raise NotImplementedError

    def host_seconds(self, size: StepSize) -> float:
        """Returns the host's seconds for a step."""
        return self.host.seconds(size)

    def knows(self, size: StepSize) -> bool:
        """True if steps of this shape were measured; a model without shapes knows all."""
        return True

    def residuals(self, size: StepSize) -> Sequence[float]:
        """Returns equally probable ratios of measured to modelled times; empty where none are known."""
        return ()

    def start(self, seed: Seed = None) -> Timer:
        """Returns a timer for the steps of one engine in one run.

        Args:
          seed: of the noise; None takes the model's seconds as they are.
        """
        return Timer(self, seed)


class Coverage:
    """The share of steps' time in shapes unknown to the cost model.

    Attributes:
      total_s, extrapolated_s: seconds of all steps, and of steps of unknown shapes.
      unknown: number of steps by unknown shape.
    """

    def __init__(self) -> None:
        self.total_s = self.extrapolated_s = 0.0
        self.unknown: collections.Counter[Any] = collections.Counter()

    def add(self, shape: Any, known: bool, seconds: float) -> None:
        """Counts a step."""
        self.total_s += seconds
        if not known:
            self.extrapolated_s += seconds
            self.unknown[shape] += 1

    @classmethod
    def of(cls, parts: Iterable[Coverage]) -> Coverage:
        """Returns the coverage of several engines together."""
        found = cls()
        for part in parts:
            found.total_s += part.total_s
            found.extrapolated_s += part.extrapolated_s
            found.unknown += part.unknown
        return found

    def check(self) -> None:
        """Checks that the model knew nearly all steps.

        Raises:
          ConfigError: steps of unseen shapes took more than MOST_EXTRAPOLATED of the time; says which and how many.
        """
        if self.extrapolated_s > MOST_EXTRAPOLATED * self.total_s:
            shapes = ", ".join(f"{tuple(shape)} ({count:,} steps)" for shape, count in self.unknown.most_common(3))
            raise ConfigError(
                f"{self.extrapolated_s / self.total_s:.1%} of the time are steps of {len(self.unknown)} shapes that "
                f"were not measured, at most {MOST_EXTRAPOLATED:.0%} may be; record steps like these too: {shapes}"
            )


class Timer:
    """Times the steps of one engine in one run, one after the other.

    Attributes:
      coverage: whether the model knows the steps that were timed.
    """

    def __init__(self, cost: Cost, seed: Seed = None):
        self.cost, self.coverage = cost, Coverage()
        self._random = None if seed is None else np.random.default_rng(seed)

    def seconds(self, size: StepSize) -> float:
        """Returns the device's seconds for the next step, without its moves."""
        seconds = self.cost.seconds(size)
        if self._random is not None and len(factors := self.cost.residuals(size)):
            seconds *= factors[int(self._random.random() * len(factors))]
        self.coverage.add(size.shape, self.cost.knows(size), seconds)
        return seconds

    def host_seconds(self, size: StepSize) -> float:
        """Returns the host's seconds for the next step."""
        return self.cost.host_seconds(size)


@dataclasses.dataclass(frozen=True)
class AffineCost(Cost):
    """Seconds that grow with a step's tokens, attended tokens and sampled tokens; nothing depends on shapes.

    step_s: of any step. token_s: for each token. pair_s: for each pair of a token and one that it attends to.
    sampled_s: for each token sampled.
    """

    step_s: float
    token_s: float
    pair_s: float = 0.0
    sampled_s: float = 0.0

    def __post_init__(self):
        names = ("step_s", "token_s", "pair_s", "sampled_s")
        checks.require(*(checks.number(name, getattr(self, name), 0) for name in names), error=ConfigError)

    def seconds(self, size: StepSize) -> float:
        own = self.step_s + self.token_s * size.num_tokens
        return own + self.pair_s * size.num_attended + self.sampled_s * size.num_sampled


def read_fields(kind: type, given: Mapping[str, Any], **read: Callable[[Any], Any]) -> Any:
    """Returns a model of costs of the fields of a JSON object.

    Args:
      read: readers of fields that are not plain numbers.

    Raises:
      ConfigError: a field is missing, unknown or out of range.
    """
    fields = [f for f in dataclasses.fields(kind) if f.init]
    names = [f.name for f in fields]
    mapping_of("cost", given, names)
    needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    if missing := sorted(needed - given.keys()):
        raise ConfigError(f"cost has no {missing[0]!r}")
    read = {"host": _read_host, "move": read_moves, **read}
    return kind(**{name: read[name](value) if name in read else value for name, value in given.items()})


def _read_host(given: Any) -> HostCost:
    found = mapping_of("cost: host", given, [field.name for field in dataclasses.fields(HostCost)])
    checks.require(*(checks.number(name, value, 0) for name, value in found.items()), error=ConfigError)
    return HostCost(**found)


def read_affine(given: Mapping[str, Any]) -> AffineCost:
    return read_fields(AffineCost, given)


# Readers of models of costs, by level, of the fields of a JSON object.
COSTS: dict[str, str] = {
    "affine": "ksana_jax.lab.simulator.cost:read_affine",
    "fitted": "ksana_jax.lab.simulator.fitted:read_fitted",
    "replay": "ksana_jax.lab.simulator.replay:read_replay",
    "roofline": "ksana_jax.lab.simulator.roofline:read_roofline",
}


def read_cost(given: Mapping[str, Any] | str | Path) -> Cost:
    """Returns a model of costs.

    Args:
      given: a "level", a key of COSTS, and its fields; or a JSON file with them, as `ksana simulate fit` writes it.

    Raises:
      ConfigError: there is no such file or level, or a field is wrong.
    """
    if not isinstance(given, Mapping):
        if not isinstance(given, (str, Path)) or not str(given):
            raise ConfigError(f"cost is {checks.shown(given)}, must be a mapping with a level, or the name of a file")
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"cost {given!s}: {error}") from None
        if not isinstance(given, Mapping):
            raise ConfigError("cost: the file has no JSON object")
    fields = dict(given)
    if (format := fields.pop("format", FORMAT)) != FORMAT:
        raise ConfigError(f"cost has format {format}, this version reads {FORMAT}")
    level = fields.pop("level", None)
    checks.require(checks.one_of("cost.level", level, COSTS), error=ConfigError)
    return resolve(level, COSTS, "cost.level")(fields)
