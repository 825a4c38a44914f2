"""Measured costs: an affine function of a step's size for each phase, corrected for each measured shape. No jax.

Phases are steps that only decode and steps with chunks. The function has padded and real sizes, since cost depends on
the implementation: dense attention computes all entries of a block table, a kernel those in use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.recording import plain_shape, read_shape
from ksana_jax.lab.simulator.cost import Cost, read_fields
from ksana_jax.lab.simulator.move_cost import mapping_of
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.scheduler.step.types import StepShape

DECODE, CHUNK = PHASES = ("decode", "chunk")


def phase_of(size: StepSize) -> str:
    return CHUNK if size.num_chunked else DECODE


def features(size: StepSize) -> dict[str, float]:
    """Returns the features of a step's time: padded sizes and real ones."""
    padded_tokens, padded_pairs = _padded(size.shape)
    return {
        "step": 1.0,
        "tokens": float(size.num_tokens),
        "padded_tokens": padded_tokens,
        "pairs": float(size.num_attended),
        "padded_pairs": padded_pairs,
        "sampled": float(size.num_sampled),
        "after_chunk": float(size.after_chunk and not size.num_chunked),
    }


FEATURES = ("step", "tokens", "padded_tokens", "pairs", "padded_pairs", "sampled", "after_chunk")


@functools.cache
def _padded(shape: StepShape) -> tuple[float, float]:
    """Returns a shape's tokens, and its pairs of a token and an entry of its block table."""
    return float(shape.num_tokens), float(shape.num_tokens * shape.table_width)


@dataclasses.dataclass(frozen=True)
class ShapeTimes:
    """Measured times of steps of one shape.

    count: steps. mean_s: of their seconds. factor: their total seconds over the affine function's.
    residuals: equally probable ratios of their seconds to the model's; their mean is 1. Means and not medians,
    because the time of a request is a sum over steps.
    """

    shape: StepShape
    count: int
    mean_s: float
    factor: float
    residuals: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedCost(Cost):
    """Costs that were measured.

    phases: {phase: {feature: seconds}}. shapes: those that were measured; others take the affine function alone and
    count as extrapolated. residuals: of each phase, for shapes with few steps.
    method: "affine", or "table": steps of a measured shape take their mean, whatever they compute.
    """

    method: str = "affine"
    phases: Mapping[str, Mapping[str, float]]
    shapes: Sequence[ShapeTimes]

    def __post_init__(self):
        checks.require(checks.one_of("cost.method", self.method, ("affine", "table")), error=ConfigError)
        for phase, found in mapping_of("cost.phases", self.phases, PHASES).items():
            for name, value in mapping_of(f"cost.phases.{phase}", found, FEATURES).items():
                checks.require(checks.number(f"cost.phases.{phase}.{name}", value, 0), error=ConfigError)

    @functools.cached_property
    def _shapes(self) -> dict[StepShape, ShapeTimes]:
        return {s.shape: s for s in self.shapes}

    def _find(self, size: StepSize) -> ShapeTimes | None:
        return self._shapes.get(size.shape)

    def seconds(self, size: StepSize) -> float:
        found = self._find(size)
        if found is not None and self.method == "table":
            return found.mean_s
        phase = phase_of(size)
        if phase not in self.phases:
            raise ConfigError(f"the model of costs has no {phase} steps: none were recorded")
        of = features(size)
        seconds = sum(value * of[name] for name, value in self.phases[phase].items())
        return seconds * (1.0 if found is None else found.factor)

    def knows(self, size: StepSize) -> bool:
        return self._find(size) is not None

    def residuals(self, size: StepSize) -> Sequence[float]:
        found = self._find(size)
        return () if found is None else found.residuals

    def times(self, factor: float) -> FittedCost:
        """Returns the costs of a machine that takes `factor` times as long, its host too."""
        phases = {phase: {name: s * factor for name, s in found.items()} for phase, found in self.phases.items()}
        shapes = [dataclasses.replace(s, mean_s=s.mean_s * factor) for s in self.shapes]
        return dataclasses.replace(self, phases=phases, shapes=shapes, host=self.host.times(factor))

    def plain(self) -> dict[str, Any]:
        """Returns the JSON object that `read_cost` takes."""
        shapes = [dataclasses.asdict(s) | {"shape": plain_shape(s.shape)} for s in self.shapes]
        return {
            "level": "fitted",
            "method": self.method,
            "provenance": dict(self.provenance),
            "host": dataclasses.asdict(self.host),
            "move": dataclasses.asdict(self.move),
            "phases": {phase: dict(found) for phase, found in self.phases.items()},
            "shapes": shapes,
        }


def read_fitted(given: Mapping[str, Any]) -> FittedCost:
    """Returns the model of the fields of a JSON object.

    Raises:
      ConfigError: a field is missing, unknown or out of range.
    """
    return read_fields(FittedCost, given, shapes=_read_shapes)


def _read_shapes(given: Any) -> list[ShapeTimes]:
    try:
        found = [ShapeTimes(**s | {"shape": read_shape(s["shape"]), "residuals": tuple(s["residuals"])}) for s in given]
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"cost.shapes: {error}") from None
    for number, times in enumerate(found):
        name = f"cost.shapes[{number}]"
        checks.require(
            checks.integer(f"{name}.count", times.count),
            checks.number(f"{name}.mean_s", times.mean_s, 0),
            checks.number(f"{name}.factor", times.factor, 0),
            *(checks.number(f"{name}.residuals", value, 0) for value in times.residuals),
            error=ConfigError,
        )
    return found
