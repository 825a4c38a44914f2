"""Histograms in the form of Prometheus, cheap to add to, and the one of an event loop's lag."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Iterator, Sequence

# vLLM's, so that its dashboards fit.
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
FIRST_TOKEN_S += (640, 2560)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
BLOCK_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# For the lag of event loops.
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def one_two_five(most: int) -> tuple[int, ...]:
    """Returns 1, 2, 5, 10, 20, 50, ... up to `most`."""
    steps = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    return tuple(itertools.takewhile(lambda bound: bound <= most, steps))


class Histogram:
    """Counts of values by range. bounds: upper bounds, inclusive, rising."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.sum = tuple(bounds), 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float | None, times: int = 1) -> None:
        """Adds a value as several equal observations; None is ignored."""
        if value is not None and times > 0:
            self._counts[bisect.bisect_left(self.bounds, value)] += times
            self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yields each bound, "+Inf" last, with the number of values up to it."""
        names = [f"{float(bound)}" for bound in self.bounds] + ["+Inf"]
        yield from zip(names, itertools.accumulate(self._counts), strict=True)


class LoopLag:
    """Measures how late an event loop runs callbacks, every interval_s seconds: the delay that tasks cause each other.

    Attributes:
      histogram: seconds by which probes were late.
    """

    def __init__(self, interval_s: float = 0.1):
        self.histogram, self._interval_s = Histogram(LAG_S), interval_s
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to probe the running event loop."""
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = loop.call_later(self._interval_s, self._look, loop, loop.time() + self._interval_s)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.histogram.observe(max(loop.time() - due_s, 0.0))
        self._schedule(loop)
