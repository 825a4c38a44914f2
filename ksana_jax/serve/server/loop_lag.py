"""Measures how late an event loop runs its callbacks: the delay that tasks, and so clients, cause each other.

Knows nothing of servers.
"""

from __future__ import annotations

import asyncio

from ksana_jax.serve.server.histogram import Histogram

LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class LoopLag:
    """Probes an event loop every interval_s seconds.

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
