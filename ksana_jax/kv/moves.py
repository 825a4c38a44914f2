"""Copies of whole blocks that the executor makes before a step computes. Noted here, made elsewhere; no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from ksana_jax.kv.counters import Counters

_NO_PAIRS = np.zeros((0, 2), np.int32)


@dataclasses.dataclass
class Moves:
    """Whole blocks to be copied before a step computes, in this order; each [n, 2] int32 of from and to.

    saves: device blocks to host slots. copies: device blocks to device blocks (copy-on-write), all read before one is
    written. loads: host slots to device blocks.
    """

    saves: np.ndarray
    copies: np.ndarray
    loads: np.ndarray


class PendingMoves:
    """Moves noted since the last step.

    saves: {host slot: device block}. copies: {new device block: the one it is copied from}.
    loads: {device block: host slot}.
    """

    def __init__(self, counters: Counters):
        self.saves: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.loads: dict[int, int] = {}
        self._counters = counters

    def save(self, block: int, slot: int) -> None:
        """Notes that a block of the device is to be copied to a slot of the host."""
        # A block that is itself still to be written is read where its content comes from.
        self.saves[slot] = self.copies.get(block, block)
        self._counters.saved += 1

    def copy(self, block: int, new: int) -> None:
        """Notes that a block of the device is to be copied to another one."""
        self.copies[new] = self.copies.get(block, block)
        self._counters.copied += 1

    def load(self, slot: int, block: int) -> None:
        """Notes that a slot of the host is to be copied to a block of the device."""
        self.loads[block] = slot

    def take(self) -> Moves | None:
        """Returns what is to be copied, which is pending no longer; None for nothing."""
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
