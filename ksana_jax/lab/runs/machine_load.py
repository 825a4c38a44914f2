"""Load of the machine and compilations during a measurement. Reads /proc where it exists."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# Columns of /proc/stat: idle and iowait.
_IDLE = (3, 4)
_COMPILED = "/jax/core/compile/backend_compile_duration"


def processor_seconds(proc: Path = Path("/proc")) -> tuple[float, float] | None:
    """Returns the busy seconds and the total seconds of the machine's processors; None if unknown."""
    try:
        numbers = (proc / "stat").read_text().splitlines()[0].split()[1:9]  # guests are in user and nice already
        ticks = [int(number) for number in numbers]
    except (OSError, ValueError, IndexError):
        return None
    total, hertz = sum(ticks), os.sysconf("SC_CLK_TCK")
    return (total - sum(ticks[i] for i in _IDLE)) / hertz, total / hertz


def seconds_of(pid: int, proc: Path = Path("/proc")) -> float:
    """Returns the processor seconds that a running process has used, with all its threads; 0 if it has ended."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class Load:
    """Measures the share of the machine's processor time that other programs take between two calls of `read`.

    Args:
      pids: returns other processes that count as this one, such as measured peers.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]] = tuple,
        clock: Callable[[], tuple[float, float] | None] = processor_seconds,
    ):
        self._pids, self._clock = pids, clock
        self._before = self._now()

    def read(self) -> float | None:
        """Returns the share since the last value, 0 to 1; None if it is not known or too little time has passed."""
        before, now = self._before, self._now()
        if before is None or now is None or now[1] - before[1] < 0.1:  # processors tick a hundred times a second
            return None
        self._before = now
        busy, there, own = (b - a for a, b in zip(before, now, strict=True))
        return min(max((busy - own) / there, 0.0), 1.0)

    def _now(self) -> tuple[float, float, float] | None:
        if (found := self._clock()) is None:
            return None
        _, _, *ended, _ = os.times()  # of children
        return (*found, time.process_time() + sum(ended) + sum(map(seconds_of, self._pids())))


class Compilations:
    """Counts this process's requests to XLA's compiler, cached or not."""

    def __init__(self):
        import jax

        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == _COMPILED

    def close(self) -> None:
        import jax

        jax.monitoring.unregister_event_duration_listener(self._hear)

    def read(self) -> int:
        """Returns their number since the last call."""
        count, self.count = self.count, 0
        return count
