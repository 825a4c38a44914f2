"""Order between the accesses of a block of threads: vector clocks of its warps and mbarriers. Knows no memory.

Two accesses are ordered if a chain of arrivals and waits leads from one to the other, however the warps happen to run.
A moment is a number that grows with every event of the block; its last bits name its owner: a warp, or an
mbarrier, for the copies that complete on it. Each warp keeps the latest moment of each that it knows.

Source: vector clocks, Flanagan and Freund, "FastTrack", PLDI 2009, section 2.
"""

from __future__ import annotations

import numpy as np

_BITS = 6


class Clocks:
    """Moments of a block.

    Args:
      num_mbarriers: maximum number of initialised ones.

    `told`: [warps, warps + mbarriers] the latest moment of each that a warp knows; for itself the present one.
    """

    def __init__(self, num_warps: int, num_mbarriers: int):
        columns = num_warps + num_mbarriers
        if columns > 1 << _BITS:
            raise NotImplementedError(f"{num_warps} warps and {num_mbarriers} mbarriers: more than {1 << _BITS}")
        self._time = 0
        self.told = np.zeros((num_warps, columns), np.int32)
        for warp in range(num_warps):
            self.told[warp, warp] = self.next(warp)

    def next(self, column: int) -> int:
        """Returns a new moment."""
        self._time += 1
        return self._time << _BITS | column


def owner(moments):
    """The columns of moments, of one or of an array."""
    return moments & (1 << _BITS) - 1


def knows(told: np.ndarray, moments: np.ndarray) -> bool:
    """True if a warp with this knowledge knows all these moments; 0 is before all."""
    first = moments.flat[0]
    if told[owner(first)] >= first and (moments == first).all():  # most moments belong to one copy
        return True
    return bool((told[owner(moments)] >= moments).all())


class Meeting:
    """Knowledge of the arrivals at a barrier, for the warps that wait for its phase to end."""

    def __init__(self, columns: int):
        self._arrived, self._told = np.zeros((2, columns), np.int32)

    def join(self, told: np.ndarray) -> None:
        np.maximum(self._arrived, told, out=self._arrived)

    def end_phase(self) -> None:
        self._told = self._arrived.copy()

    def tell(self, told: np.ndarray) -> None:
        """Adds to a warp's knowledge."""
        np.maximum(told, self._told, out=told)
