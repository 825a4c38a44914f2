"""Costs of a recording: each step takes the time of the step with its number. Decisions equal the recorded ones."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.simulator.cost import Cost, Seed, Timer, read_fields
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.lab.simulator.step_times import device_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayCost(Cost):
    """Recorded seconds by number of the step; moves are part of them.

    device_s, host_s: of each step.
    """

    device_s: Sequence[float]
    host_s: Sequence[float]

    def __post_init__(self):
        for name in ("device_s", "host_s"):
            checks.require(*(checks.number(name, value, 0) for value in getattr(self, name)), error=ConfigError)
        if len(self.device_s) != len(self.host_s):
            raise ConfigError(f"cost has {len(self.device_s):,} device_s and {len(self.host_s):,} host_s")

    @classmethod
    def of(
        cls, records: Sequence[StepRecord], provenance: Mapping[str, Any] | None = None, *, spare: int = 0
    ) -> ReplayCost:
        """Returns the costs of recorded steps.

        Args:
          spare: steps that may follow, each as long as the median: requests that arrive by time, not by step, may come
            to a few steps more.
        """
        reported_s = [0.0, *(record.report_s for record in records)]
        host_s = [record.schedule_s + s for record, s in zip(records, reported_s, strict=False)]
        device_s = device_seconds(records)
        device_s, host_s = ([*s, *[statistics.median(s)] * spare] for s in (device_s, host_s))
        return cls(device_s=device_s, host_s=host_s, provenance=provenance or {})

    def start(self, seed: Seed = None) -> Timer:
        if seed is not None:
            raise ConfigError(f"seed is {seed}: recorded times have no noise to be drawn")
        return ReplayTimer(self)


class ReplayTimer(Timer):
    """Returns the recorded times one after the other."""

    def __init__(self, cost: ReplayCost):
        super().__init__(cost)
        # The last step of a recording may have one ahead of it, which was never awaited.
        self._device, self._host, self._num_steps = (
            iter([*cost.device_s, 0.0]),
            iter([*cost.host_s, 0.0]),
            len(cost.device_s),
        )

    def seconds(self, size: StepSize) -> float:
        """Returns the recorded seconds of the next step.

        Raises:
          ConfigError: more steps are computed than were recorded.
        """
        return self._next(self._device)

    def host_seconds(self, size: StepSize) -> float:
        return self._next(self._host)

    def _next(self, seconds: Any) -> float:
        try:
            return next(seconds)
        except StopIteration:
            raise ConfigError(f"the recording has {self._num_steps:,} steps, more are computed") from None


def read_replay(given: Mapping[str, Any]) -> ReplayCost:
    """Returns the costs of the fields of a JSON object."""
    return read_fields(ReplayCost, given)
