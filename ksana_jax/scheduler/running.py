"""The running rows, in order of service. Knows keys and row numbers, no sequences, no blocks."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np


class Running:
    """Running rows in the order of their keys; the other rows are free.

    Attributes:
      order: [running] np.intp, the first to be served first.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.order = np.zeros(0, np.intp)
        self._keys: list[Any] = []
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def has_free_row(self) -> bool:
        return bool(self._free)

    def enter(self, key: Any) -> int:
        """Inserts a free row by its key; returns the row."""
        row, where = self._free.pop(), bisect.bisect(self._keys, key)
        self._keys.insert(where, key)
        before, self.order = self.order, np.empty(len(self.order) + 1, np.intp)  # a tenth of the time of np.insert
        self.order[:where], self.order[where], self.order[where + 1 :] = before[:where], row, before[where:]
        return row

    def leave(self, rows: np.ndarray) -> None:
        """Frees rows."""
        left = np.zeros(self.num_rows, bool)
        left[rows] = True
        stays = ~left[self.order]
        self._keys = [key for key, kept in zip(self._keys, stays, strict=True) if kept]
        self.order = self.order[stays]
        self._free += rows.tolist()

    def check(self, alive: np.ndarray) -> None:
        """Checks the order against the rows that are alive: boolean [rows].

        Raises:
          AssertionError: they differ.
        """
        assert len(self.order) + len(self._free) == self.num_rows
        assert set(np.flatnonzero(alive).tolist()) == set(self.order.tolist())
