"""Barriers of a block of threads: mbarriers, which wait for arrivals and for bytes, and the named ones of bar.sync."""

from __future__ import annotations

from pallas_kernels.ptx.memory import SHARED_BASE, Trap


class MBarrier:
    """One mbarrier. A phase is complete when all arrivals have come and as many bytes as were announced."""

    def __init__(self, address: int, count: int):
        self.place = f"the mbarrier at byte {address - SHARED_BASE}"
        self.count = self.missing = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int, expected_bytes: int = 0) -> None:
        self.bytes += expected_bytes
        self.missing -= count
        if self.missing < 0:
            raise Trap(
                f"{count} threads arrive at {self.place}, which waited for {self.missing + count} of {self.count}"
            )
        self._turn()

    def deliver(self, num_bytes: int) -> None:
        """A copy has written its bytes; it may be there before the threads that announce it."""
        self.bytes -= num_bytes
        self._turn()

    def passed(self, parity: int) -> bool:
        """Whether the last phase of this parity is complete."""
        return self.phase & 1 != parity

    def _turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count

    def __str__(self) -> str:
        return (
            f"{self.place} (phase {self.phase}: {self.missing} of {self.count} arrivals and {self.bytes} bytes missing)"
        )


class NamedBarrier:
    """bar.sync: warps wait for one another, 32 threads each."""

    def __init__(self):
        self.arrived = 0
        self.phase = 0

    def arrive(self, expected: int) -> None:
        self.arrived += 32
        if self.arrived > expected:
            raise Trap(f"{self.arrived} threads arrive at a bar.sync of {expected}")
        if self.arrived == expected:
            self.arrived = 0
            self.phase += 1
