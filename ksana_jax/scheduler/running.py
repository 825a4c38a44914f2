"""Running rows: their order, the budget of a step, and blocks for their tokens.

Knows rows and blocks; no waiting sequences.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ksana_jax.kv.memory import KVMemory
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.step.types import NewBlocks, TileGroup


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


@dataclasses.dataclass
class StepBudget:
    """The remaining tokens of a step, and its remaining query tiles for rows that compute more than one token.

    tiles: number of free tiles of each width, the widest first. All tiles of a step have one width: the widest that
      has enough tiles for its chunks.
    """

    tokens: int
    tiles: list[TileGroup]

    def most(self, left: int) -> int:
        """Returns how many of a row's `left` tokens fit."""
        if left == 1:
            return min(self.tokens, 1)
        wide, *narrow = [part.count * part.width for part in self.tiles]
        if wide > 0:
            return min(left, self.tokens, wide)
        # A chunk that is cut anyway waits, so that the whole step need not read its keys for fewer queries at once.
        return left if any(left <= min(self.tokens, tokens) for tokens in narrow) else 0

    def take(self, count: int) -> None:
        """Deducts the tokens and tiles of a row that computes `count` tokens."""
        self.tokens -= count
        if count > 1:
            self.tiles = [TileGroup(free - -(-count // width), width) for free, width in self.tiles]


@dataclasses.dataclass(frozen=True)
class Provision:
    """Provides rows of `running` with blocks from `memory`, in the tables of `row_blocks`.

    Args:
      preempt: takes a row's blocks; its sequence waits again.
      reclaim_shared: takes the shared blocks of a waiting sequence; False if none has any.
    """

    memory: KVMemory
    running: Running
    row_blocks: RowBlocks
    preempt: Callable[[int], None]
    reclaim_shared: Callable[[], bool]

    def num_missing(self, short: np.ndarray, only_decodes: bool) -> int:
        """Returns the maximum blocks that running rows need for all of their tokens; short: those that need some."""
        r, size, count = self.row_blocks.rows, self.memory.block_size, len(short)
        if not only_decodes:
            count = int(np.add.reduce((r.num_tokens[short] - r.allocated_until[short] + size - 1) // size))
        copies = self.row_blocks.copying.most_copies if np.count_nonzero(r.forked) else 0
        return r.num_groups * count + copies

    def to_decodes(self, decodes: np.ndarray, short: np.ndarray) -> tuple[np.ndarray, NewBlocks | None]:
        """Provides rows with blocks for one token each, preempting others if need be.

        Args:
          short: the rows that need a block, in each group.

        Returns:
          The rows that run; `ScheduledBatch.new`.
        """
        r, copies, needed = self.row_blocks.rows, None, len(short) * self.row_blocks.rows.num_groups
        if np.count_nonzero(r.forked):
            copies = self.row_blocks.copying.shared(decodes).sum(axis=(0, 2))
            needed += int(copies.sum())
        if needed > self.memory.blocks.num_available:
            return self._by_force(decodes), None
        new = self.row_blocks.take(short) if len(short) else None
        if copies is not None:
            for row in decodes[copies > 0].tolist():
                self.row_blocks.provide(row, 1)
        return decodes, new

    def _by_force(self, decodes: np.ndarray) -> np.ndarray:
        """Gives rows the blocks they need for one token, in order, preempting from the end; returns those that run."""
        r = self.row_blocks.rows
        needs = (r.num_computed[decodes] >= r.allocated_until[decodes]) | r.forked[decodes]
        for i in np.flatnonzero(needs):
            row = int(decodes[i])
            if r.alive[row] and self._make_room_to_write(row):
                self.row_blocks.provide(row, 1)
                needs[i] = False
        return decodes[~needs & r.alive[decodes]]

    def _make_room_to_write(self, row: int) -> bool:
        """Makes room for one more token of a row, and for copies of the blocks that it shares; see `_make_room`."""
        r, available = self.row_blocks.rows, self.memory.blocks.num_available
        count = r.num_groups if r.num_computed[row] >= r.allocated_until[row] else 0
        if r.forked[row]:
            count += self.row_blocks.copying.prepare(row, available - count)
        return self._make_room(row, count)

    def _make_room(self, row: int, count: int) -> bool:
        """Makes `count` blocks available to a row, preempting rows after it; False if it is the last and must wait.

        The first row always gets its blocks: a request that the pool cannot hold was refused on arrival.
        """
        while self.memory.blocks.num_available < count:
            last = int(self.running.order[-1])
            if last != row:
                self.preempt(last)
            elif not self.reclaim_shared():
                return False
        return True

    def to_chunk(self, row: int, budget: StepBudget) -> int:
        """Provides a running row that has several tokens left for its next chunk; returns the chunk's tokens."""
        r = self.row_blocks.rows
        most = budget.most(r.next_chunk(row)) if r.alive[row] else 0
        if not most:
            return 0
        if not self._make_room_to_write(row):
            return 0
        budget.take(count := self.row_blocks.extend(row, most))
        return count
