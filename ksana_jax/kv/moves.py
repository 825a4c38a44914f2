"""Records copies of whole blocks, which the executor makes before a step computes. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from ksana_jax.kv.counters import Counters

_NO_PAIRS = np.zeros((0, 2), np.int32)


@dataclasses.dataclass
class Moves:
    """Blocks to copy before a step computes, in the order of the fields; each [n, 2] int32 of source and target ids.

    saves: device blocks to host slots. copies: device blocks to device blocks (copy-on-write), all read before any is
    written. loads: host slots to device blocks.
    """

    saves: np.ndarray
    copies: np.ndarray
    loads: np.ndarray


class PendingMoves:
    """Collects the moves recorded since the last step.

    saves: {host slot: device block}. copies: {new device block: the one it is copied from}.
    loads: {device block: host slot}.
    """

    def __init__(self, counters: Counters):
        self.saves: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.loads: dict[int, int] = {}
        self._counters = counters

    def save(self, block: int, slot: int) -> None:
        """Records a copy of a device block to a host slot."""
        # If the block itself is the target of a pending move, the copy reads that move's source.
        self.saves[slot] = self.copies.get(block, block)
        self._counters.saved += 1

    def copy(self, block: int, new: int) -> None:
        """Records a copy of a device block to another one."""
        self.copies[new] = self.copies.get(block, block)
        self._counters.copied += 1

    def load(self, slot: int, block: int) -> None:
        """Records a copy of a host slot to a device block."""
        self.loads[block] = slot

    def take(self) -> Moves | None:
        """Returns the pending moves and clears them; None if there are none."""
        if not (self.saves or self.copies or self.loads):
            return None
        self._counters.loaded += len(self.loads)
        moves = Moves(
            _pairs((block, slot) for slot, block in self.saves.items()),
            _pairs((old, new) for new, old in self.copies.items()),
            _pairs((slot, block) for block, slot in self.loads.items()),
        )
        self.saves, self.copies, self.loads = {}, {}, {}
        return moves


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    found = list(pairs)
    return np.array(found, np.int32) if found else _NO_PAIRS
