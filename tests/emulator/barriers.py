"""Barriers of a block of threads: mbarriers, which wait for arrivals and for bytes, and the named ones of bar.sync."""

from __future__ import annotations

import numpy as np

from tests.emulator.memory import SHARED_BASE, Trap
from tests.emulator.order import Meeting


class MBarrier:
    """One mbarrier. A phase is complete when all arrivals and all announced bytes have come.

    Args:
      made: moment in which a warp initialises it.
      column: of the copies that complete on it. columns: number of columns.

    `fenced`: True if that warp has executed a fence since, so that copies may complete on it. `loads`: moment of the
    last copy that was issued.
    """

    def __init__(self, address: int, count: int, made: int, column: int, columns: int):
        self.place = f"the mbarrier at byte {address - SHARED_BASE}"
        self.count = self.missing = count
        self.made, self.column, self.fenced, self.loads = made, column, False, 0
        self.meeting, self._copies = Meeting(columns), np.zeros(columns, np.int32)
        self.bytes = 0
        self.phase = 0

    def arrive(self, told: np.ndarray, count: int, expected_bytes: int = 0) -> None:
        """Counts arrivals of `count` threads of a warp with this knowledge."""
        self.meeting.join(told)
        self.bytes += expected_bytes
        self.missing -= count
        if self.missing < 0:
            raise Trap(
                f"{count} threads arrive at {self.place}, which waited for {self.missing + count} of {self.count}"
            )
        self._turn()

    def deliver(self, num_bytes: int, moment: int) -> None:
        """The copy of a moment has written its bytes; they may arrive before the threads that announce them."""
        self.bytes -= num_bytes
        self._copies[self.column] = max(self._copies[self.column], moment)
        self.meeting.join(self._copies)
        self._turn()

    def passed(self, parity: int) -> bool:
        """True if the last phase of this parity is complete."""
        return self.phase & 1 != parity

    def _turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count
            self.meeting.end_phase()

    def __str__(self) -> str:
        return (
            f"{self.place} (phase {self.phase}: {self.missing} of {self.count} arrivals and {self.bytes} bytes missing)"
        )


class NamedBarrier:
    """bar.sync: warps wait for one another, 32 threads each."""

    def __init__(self, columns: int):
        self.arrived = 0
        self.phase = 0
        self.meeting = Meeting(columns)

    def arrive(self, told: np.ndarray, expected: int) -> None:
        self.meeting.join(told)
        self.arrived += 32
        if self.arrived > expected:
            raise Trap(f"{self.arrived} threads arrive at a bar.sync of {expected}")
        if self.arrived == expected:
            self.arrived = 0
            self.phase += 1
            self.meeting.end_phase()
