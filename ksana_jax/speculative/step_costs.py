"""Seconds of an engine's steps by their shape: as measured ahead of time, then as they are in service."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from ksana_jax.step.contract import Part

# Measurements whose median is taken, and after how many a shape counts as measured.
RECENT, ENOUGH = 5, 3


@dataclasses.dataclass
class _Measured:
    """Seconds of steps of one shape.

    recent: of the last ones that followed another step of the shape. group: of steps that count as one.
    first_s: of the last one that followed a step of another shape, whose data the caches of a CPU then hold.
    """

    recent: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=RECENT))
    group: list[float] = dataclasses.field(default_factory=list)
    first_s: float | None = None
    number: int = 0


class StepCosts:
    """Seconds of steps.

    Args:
      steps_per_call: plain steps that share a call of the device, and of which the last ones seem to take no time.
    """

    def __init__(self, steps_per_call: int = 1):
        self._steps_per_call = steps_per_call
        # Of the device alone, as measured ahead of time.
        self.ahead: Mapping[Part, float] = {}
        self._measured: collections.defaultdict[Part, _Measured] = collections.defaultdict(_Measured)

    def set_ahead(self, seconds: Mapping[Part, float]) -> None:
        """Takes the seconds that the device needs for steps, measured ahead of time, in place of those it has."""
        self.ahead = dict(seconds)

    def may_run(self, part: Part) -> bool:
        """Whether steps of this part are compiled, as far as it is known: those that were measured ahead of time."""
        return not self.ahead or part in self.ahead

    def is_measured(self, part: Part) -> bool:
        """Whether enough steps of this part were measured in service."""
        return self._measured[part].number >= ENOUGH * self._group(part)

    def _group(self, part: Part) -> int:
        return self._steps_per_call if part.width == 1 else 1

    def observe(self, part: Part, seconds: float, is_first: bool) -> None:
        """Takes note of a step in service; is_first: it follows a step of another kind."""
        found = self._measured[part]
        found.number += 1
        if is_first:
            found.first_s = seconds
            found.group.clear()
            return
        found.group.append(seconds)
        if len(found.group) >= self._group(part):
            found.recent.append(sum(found.group) / len(found.group))
            found.group.clear()

    def plain_s(self, part: Part) -> float:
        """Returns the seconds of a step without drafts; 0 if nothing is known of it."""
        found = self.in_service(part)
        return self.ahead.get(part, 0.0) if found is None else found

    def seconds(self, part: Part, plain: Part) -> float:
        """Returns the seconds of a step with drafts of `part`, given the part of the same rows without drafts.

        A step that was never seen in service takes so much longer than a plain one as the device needs for it. If that
        was not measured, it lies between that of a plain step and of one with longer drafts; nothing if there is none.
        """
        found, plain_s = self.in_service(part), self.plain_s(plain)
        if found is not None:
            return found
        if part not in self.ahead or plain not in self.ahead:
            return plain_s + self._more_s(part, plain_s)
        return max(self.ahead[part], plain_s + self.ahead[part] - self.ahead[plain])

    def _more_s(self, part: Part, plain_s: float) -> float:
        for other in sorted(self._measured):
            if other.count == part.count and other.width > part.width and (found := self.in_service(other)) is not None:
                return max(found - plain_s, 0.0) * (part.width - 1) / (other.width - 1)
        return 0.0

    def in_service(self, part: Part) -> float | None:
        """Returns the seconds of steps of this part in service; None before there are any that can be trusted."""
        found = self._measured[part]
        if found.recent:
            return sorted(found.recent)[len(found.recent) // 2]
        return found.first_s if self.is_measured(part) else None
