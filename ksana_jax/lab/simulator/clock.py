"""The simulated time and its queue of events. Knows no engine."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Tells the time in seconds, and waits for a time."""

    def __call__(self) -> float: ...

    def advance_to(self, time_s: float) -> None:
        """Returns when a time has come; at once if it is past."""
        ...


class VirtualClock:
    """A clock that moves only when it is told to, with a queue of events.

    Called, it returns the time in seconds, so that it can stand in for `time.perf_counter`.

    Args:
      now: the time at which it begins.
    """

    def __init__(self, now: float = 0.0):
        self._now = now
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock by some seconds, at least 0; events in between do not happen."""
        assert seconds >= 0, f"a clock cannot go back {-seconds} s"
        self._now += seconds

    def advance_to(self, time_s: float) -> None:
        """Moves the clock to a time; a time that is past leaves it where it is."""
        self._now = max(self._now, time_s)

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Schedules an event; events at equal times happen in scheduling order.

        Raises:
          ValueError: the time is past, or not a number.
        """
        if not time >= self._now:
            raise ValueError(f"an event at {time} s was scheduled at {self._now} s")
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    @property
    def num_events(self) -> int:
        """Number of events to come."""
        return len(self._events)

    def run(self, until: float = math.inf) -> None:
        """Runs all events up to a time in order, including events that they schedule."""
        while self._events and self._events[0][0] <= until:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
