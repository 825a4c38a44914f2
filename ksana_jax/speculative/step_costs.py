"""Seconds of an engine's steps by their shape: as measured ahead of time, then as they are in service."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from ksana_jax.step.contract import Part

# Measurements whose median is taken, and after how many a shape counts as measured.
RECENT, ENOUGH = 9, 3
# Steps without drafts in turn after which those that follow take as long as they do without speculation: before, caches
# and threads are still those of the steps before.
SETTLED = 8


class _Recent:
    """The last few measurements. median: None before the first."""

    def __init__(self):
        self._last: collections.deque[float] = collections.deque(maxlen=RECENT)
        self.median: float | None = None

    def append(self, seconds: float) -> None:
        self._last.append(seconds)
        self.median = sorted(self._last)[len(self._last) // 2]


@dataclasses.dataclass
class _Measured:
    """Seconds of steps of one shape.

    recent: of the last ones that followed another step of the shape. hosts: what of them the host did not wait.
    settled: of the last ones without drafts that followed SETTLED others; in_turn: how many there were since a change.
    alone: of the last ones without drafts for which a proposer was asked, so that they could not run ahead.
    group: (seconds, seconds of the host) of steps that count as one.
    first_s: of the last one that followed a step of another shape, whose data the caches of a CPU then hold.
    """

    recent: _Recent = dataclasses.field(default_factory=_Recent)
    hosts: _Recent = dataclasses.field(default_factory=_Recent)
    alone: _Recent = dataclasses.field(default_factory=_Recent)
    settled: _Recent = dataclasses.field(default_factory=_Recent)
    in_turn: int = 0
    group: list[tuple[float, float]] = dataclasses.field(default_factory=list)
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

    def observe(self, part: Part, seconds: float, waited_s: float, is_first: bool, asked: bool = False) -> None:
        """Takes note of a step in service.

        Args:
          waited_s: what of its seconds the host waited for the device. is_first: it follows a step of another kind.
          asked: a proposer was asked for it.
        """
        found = self._measured[part]
        found.number += 1
        found.in_turn = 0 if is_first else found.in_turn + 1
        if asked and part.width == 1:
            found.alone.append(seconds)
        elif is_first:
            found.first_s = seconds
        else:
            found.group.append((seconds, seconds - waited_s))
            if len(found.group) >= self._group(part):
                found.recent.append(mean_s := sum(s for s, _ in found.group) / len(found.group))
                if part.width == 1 and found.in_turn >= SETTLED:
                    found.settled.append(mean_s)
                found.hosts.append(sum(s for _, s in found.group))
                found.group.clear()
            return
        found.group.clear()

    def within_call(self, part: Part) -> bool:
        """Whether other steps of the last one's call are still to be observed."""
        return bool(self._measured[part].group)

    def forget(self, num_rows: int) -> None:
        """Forgets how long steps with drafts of up to num_rows rows took in service: that was long ago."""
        for part in [part for part in self._measured if part.width > 1 and part.count <= num_rows]:
            del self._measured[part]

    def plain_s(self, part: Part) -> float:
        """Returns the seconds of a step without drafts; 0 if nothing is known of it."""
        found = self.in_service(part)
        return self.ahead.get(part, 0.0) if found is None else found

    def of_fewer(self, plain: Part, sizes: Sequence[int]) -> list[float]:
        """Returns the seconds [J] of steps of up to sizes [J] rows without drafts, the last one those of `plain`; what
        is not known is in proportion to those."""
        plain_s, ahead_s = self.plain_s(plain), self.ahead.get(plain, 0.0)
        found = []
        for count in sizes:
            known = self.in_service(part := Part(count, 1))
            if known is None and ahead_s and part in self.ahead:
                known = self.ahead[part] * plain_s / ahead_s
            found.append(plain_s * count / plain.count if known is None else known)
        return found

    def alone_s(self, plain: Part) -> float:
        """Returns the seconds of a step without drafts that the host begins after the step before has ended."""
        if (found := self._measured[plain].alone.median) is not None:
            return found
        return max(self.plain_s(plain), self.ahead.get(plain, 0.0) + self._host_s(plain))

    def _host_s(self, plain: Part) -> float:
        return self._measured[plain].hosts.median or 0.0

    def seconds(self, part: Part, plain: Part) -> float:
        """Returns the seconds of a step with drafts of `part`, given the part of the same rows without drafts.

        A step that was never seen in service takes the device's time, and the host's, since drafts follow known texts:
        such a step does not run ahead. If the device's was not measured, it lies between that of a plain step and of
        one with longer drafts; it is that of a plain step if there is none.
        """
        found = self.in_service(part)
        if found is not None:
            return found
        if part not in self.ahead or plain not in self.ahead:
            return (alone_s := self.alone_s(plain)) + self._more_s(part, alone_s)
        more_s = self.ahead[part] - self.ahead[plain]
        return max(self.ahead[part] + self._host_s(plain), self.plain_s(plain) + more_s)

    def _more_s(self, part: Part, plain_s: float) -> float:
        for other in sorted(self._measured):
            if other.count == part.count and other.width > part.width and (found := self.in_service(other)) is not None:
                return max(found - plain_s, 0.0) * (part.width - 1) / (other.width - 1)
        return 0.0

    def in_service(self, part: Part) -> float | None:
        """Returns the seconds of steps of this part in service; None before there are any that can be trusted."""
        found = self._measured[part]
        if (recent_s := found.recent.median) is not None:
            # The time that drafts have to beat: the last few steps between others with drafts may take longer.
            return recent_s if found.settled.median is None else min(recent_s, found.settled.median)
        return found.first_s if self.is_measured(part) else None
