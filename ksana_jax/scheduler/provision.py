"""Blocks for running rows: which rows of a step get theirs, and which are preempted for them. Admits none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ksana_jax.kv.memory import KVMemory
from ksana_jax.scheduler.budget import StepBudget
from ksana_jax.scheduler.queue import WaitingQueue
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.running import Running
from ksana_jax.step.contract import NewBlocks


@dataclasses.dataclass(frozen=True)
class Provision:
    """Provides rows of `running` with blocks from `memory`, in the tables of `row_blocks`.

    Args:
      preempt: takes a row's blocks; its sequence waits again, in `queue`.
    """

    memory: KVMemory
    queue: WaitingQueue
    running: Running
    row_blocks: RowBlocks
    preempt: Callable[[int], None]

    def num_missing(self, short: np.ndarray, only_decodes: bool) -> int:
        """Returns the most blocks that running rows need for all of their tokens; short: those that need some."""
        r, size, count = self.row_blocks.rows, self.memory.block_size, len(short)
        if not only_decodes:
            count = int(np.add.reduce((r.num_tokens[short] - r.allocated_until[short] + size - 1) // size))
        return r.num_groups * (count + int(np.count_nonzero(r.forked)))

    def to_decodes(self, decodes: np.ndarray, short: np.ndarray) -> tuple[np.ndarray, NewBlocks | None]:
        """Provides rows with blocks for one token each, preempting others if need be.

        Args:
          short: those of the rows that need a block in each group.

        Returns:
          The rows that run; `ScheduledBatch.new`.
        """
        r, copies, needed = self.row_blocks.rows, None, len(short) * self.row_blocks.rows.num_groups
        if np.count_nonzero(r.forked):
            copies = self.row_blocks.writes_to_shared(decodes).sum(axis=0)
            needed += int(copies.sum())
        if needed > self.memory.device.num_available:
            is_short = r.num_computed[decodes] >= r.allocated_until[decodes]
            return self._by_force(decodes, is_short * r.num_groups + (0 if copies is None else copies)), None
        new = self.row_blocks.take(short) if len(short) else None
        if copies is not None:
            for row in decodes[copies > 0].tolist():
                self.row_blocks.provide(row, 1)
        return decodes, new

    def to_drafts(self, decodes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Provides rows that have blocks for one token with those for draft tokens.

        Args:
          counts: [decodes] draft tokens of each row.

        Returns:
          How many of them have blocks: fewer where the pool has none left, since a guess is not worth anybody's blocks.
        """
        r, counts = self.row_blocks.rows, counts.copy()
        until = r.num_computed[decodes] + 1 + counts
        for place in (until > r.allocated_until[decodes]).nonzero()[0].tolist():
            counts[place] = self.row_blocks.extend(int(decodes[place]), 1 + int(counts[place])) - 1
        return counts

    def _by_force(self, decodes: np.ndarray, needed: np.ndarray) -> np.ndarray:
        """Provides rows with the blocks they need, in order, preempting from the end; returns the rows that run.

        Args:
          needed: [decodes] blocks that each row needs for one token.
        """
        runs, alive = needed == 0, self.row_blocks.rows.alive
        for i in np.flatnonzero(needed):
            row = int(decodes[i])
            if alive[row] and self._make_room(row, int(needed[i])):
                self.row_blocks.provide(row, 1)
                runs[i] = True
        return decodes[runs & alive[decodes]]

    def _make_room(self, row: int, count: int) -> bool:
        """Makes `count` blocks available to a row, preempting rows after it; False if it is the last and must wait.

        The first row always gets its blocks, so there is progress: a request that the pool cannot hold was refused on
        arrival.
        """
        while self.memory.device.num_available < count:
            last = int(self.running.order[-1])
            if last != row:
                self.preempt(last)
            elif not self.queue.reclaim_shared():
                return False
        return True

    def to_chunk(self, row: int, budget: StepBudget) -> int:
        """Provides a running row that has several tokens left for its next chunk; returns the chunk's tokens."""
        r = self.row_blocks.rows
        most = budget.most(r.next_chunk(row)) if r.alive[row] else 0
        if not most:
            return 0
        if r.num_computed[row] >= r.allocated_until[row] and not self._make_room(row, r.num_groups):
            return 0
        budget.take(count := self.row_blocks.extend(row, most))
        return count
