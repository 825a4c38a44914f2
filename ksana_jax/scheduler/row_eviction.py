"""Evictions from running rows: the rows that are due, the blocks that keep their tokens, and the device's moves.

Knows numbers of tokens; the method chooses on the device which tokens stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.eviction.apportioning import measured_budgets
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.kv.moves import Evictions
from ksana_jax.kv.state import Origin
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.row_probes import turn
from ksana_jax.scheduler.row_snapshots import RowSnapshots
from ksana_jax.scheduler.running import Running
from ksana_jax.scheduler.step.types import ScheduledBatch

Measure: TypeAlias = Callable[[Evictions], np.ndarray] | None


@dataclasses.dataclass(frozen=True)
class RowEviction:
    """Evicts tokens of rows whose budget is full.

    Cached blocks stay whole: a row's first eviction moves the kept tokens to new blocks.

    Args:
      schedule: when rows evict.
      preempt: takes a row's blocks; its sequence waits again.
      measure: returns what the method measures of rows of one group each, before they evict: [n, Lg, K, ...].
        None without keys and values: then all budgets are equal.
      snapshots: of rows after their evictions; None takes none.
    """

    schedule: EvictionSchedule
    row_blocks: RowBlocks
    running: Running
    preempt: Callable[[int], None]
    measure: Measure
    snapshots: RowSnapshots | None

    @classmethod
    def of(
        cls,
        schedule: EvictionSchedule | None,
        row_blocks: RowBlocks,
        running: Running,
        preempt: Callable[[int], None],
        measure: Measure,
    ) -> RowEviction | None:
        """Returns the evictions of a scheduler; None without a schedule."""
        if schedule is None:
            return None
        found = row_blocks.memory.prefixes.snapshots
        return cls(schedule, row_blocks, running, preempt, measure, found and RowSnapshots(found, row_blocks))

    def evict(self, rows: np.ndarray) -> None:
        """Evicts tokens from the rows whose budget is full, and releases the blocks that this empties.

        Rows that share blocks, that fill the prefix cache, that begin or end a probe, or that are measured wait for
        `evict_shared`.
        """
        r, method = self.row_blocks.rows, self.schedule.method
        if not (method.probes or method.measures) and len(due := rows[self._is_due(rows)]):
            _, counts = self._kept(due)
            due = due[(r.index_at[due] == FAR) & ~self._shared(due, counts).any(axis=(0, 2))]
            self._record(due, r.block_tables.take(due, axis=1))
        if self.snapshots is not None:
            self.snapshots.take_due(rows)

    def evict_shared(self) -> None:
        """Evicts tokens from all rows that have waited for it, or begins their probes. Only between two steps: it may
        preempt rows."""
        r, device = self.row_blocks.rows, self.row_blocks.memory.device
        rows = self.running.order
        if not len(rows := rows[self._is_due(rows)]):
            return
        if self.schedule.method.probes and not len(rows := turn(self.schedule.method, self.row_blocks, rows)):
            return
        if self.schedule.method.measures and self.measure is not None:
            self._measure(rows, self.measure)
        tables = r.block_tables.take(rows, axis=1)
        replaced = self._fork(rows)
        alive = r.alive[rows]
        self._record(rows[alive], tables[:, alive])
        # Only now: until all are recorded, no eviction may write to a block that another one reads.
        if replaced:
            device.release(np.concatenate(replaced))
        if self.snapshots is not None:
            self.snapshots.take_due(rows[alive])

    def leave(self, rows: np.ndarray, unsettled: Sequence[ScheduledBatch]) -> None:
        """Ends the probes of rows that are about to be left, and takes snapshots; see `RowSnapshots.leave`."""
        if self.snapshots is not None:
            self.snapshots.leave(rows, unsettled)
        for row in rows.tolist():
            self.row_blocks.rows.probes.pop(row, None)

    @property
    def waits(self) -> bool:
        """True if rows wait for `evict_shared`."""
        return bool(np.count_nonzero(self._is_due(self.running.order)))

    def _measure(self, rows: np.ndarray, measure: Callable[[Evictions], np.ndarray]) -> None:
        """Sets the budgets of rows that evict now by what the method measures; waits for the device."""
        r, schedule = self.row_blocks.rows, self.schedule
        groups = np.array([group for group, share in enumerate(schedule.shares) if share is not None], np.int32)
        for row, context in zip(rows.tolist(), self._contexts(rows).tolist(), strict=True):
            length, ones = r.num_computed[row], np.ones(len(groups), np.int32)
            kept = length - schedule.evictions(length[None], schedule.budgets(np.array([context])))[0][groups, 0]
            tables = r.block_tables[groups, row, : r.num_blocks[groups, row].max()]
            counts = length * ones, kept, schedule.method.sinks * ones, r.num_recent[groups, row], length * ones
            asked = Evictions(tables, tables, *counts, groups, context * ones)
            r.budgets[:, row] = measured_budgets(schedule, measure(asked), context)

    def _is_due(self, rows: np.ndarray) -> np.ndarray:
        r = self.row_blocks.rows
        return np.logical_or.reduce(r.num_computed[rows] >= r.evict_at.take(rows, axis=1))

    def _kept(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns for rows that evict now the number of tokens that each group keeps, and of blocks that it writes to
        (0: no eviction): [Gk, n] each."""
        r, size = self.row_blocks.rows, self.row_blocks.memory.block_size
        length = r.num_computed[rows]
        kept = length - self.schedule.evictions(length, r.budgets.take(rows, axis=1))[0]
        written = length if self.schedule.method.hides else kept
        return kept, np.where(kept < length - self._evicted(rows), -(-written // size), 0)

    def _evicted(self, rows: np.ndarray) -> np.ndarray:
        """Returns how many tokens each group has evicted from rows that evict now: [Gk, n]."""
        r = self.row_blocks.rows
        if not self.schedule.method.hides:
            return r.num_evicted.take(rows, axis=1)
        return self.schedule.num_evicted(r.num_computed[rows] - 1, self._contexts(rows))

    def _contexts(self, rows: np.ndarray) -> np.ndarray:
        """Returns the tokens of rows' prompts without their questions: int32 [n]."""
        seqs = [self.row_blocks.rows.seqs[row] for row in rows.tolist()]
        return np.array([seq.num_context for seq in seqs if seq is not None], np.int32)

    def _record(self, rows: np.ndarray, tables: np.ndarray) -> None:
        """Records evictions from rows for the device.

        Args:
          tables: [Gk, n, P] blocks of the rows before; afterwards they use the first ones of their tables.
        """
        r, schedule = self.row_blocks.rows, self.schedule
        if not len(rows):
            return
        length, num_sinks = r.num_computed[rows], schedule.method.sinks
        evicted, following = schedule.evictions(length, r.budgets.take(rows, axis=1))
        before, kept = length - self._evicted(rows), length - evicted
        sinks = np.full(len(rows), num_sinks, np.int32)
        recent = np.minimum(r.num_recent.take(rows, axis=1), kept - num_sinks)
        width, contexts = int(r.num_blocks.take(rows, axis=1).max()), self._contexts(rows)
        for group in range(r.num_groups):
            some = (kept[group] < before[group]).nonzero()[0]
            if len(some):
                of_group = np.full(len(rows), group, np.int32)
                columns = before[group], kept[group], sinks, recent[group], length, of_group, contexts
                if len(some) < len(rows):
                    columns = (x[some] for x in columns)
                sources, targets = tables[group, some, :width], r.block_tables[group, rows[some], :width]
                given = schedule.method.given(group, length[some])
                self.row_blocks.memory.moves.evict(Evictions(sources, targets, *columns, given=given))
        if schedule.method.hides:
            r.num_rewrites += 1
        else:
            compact(self.row_blocks, rows, kept)
        r.evict_at[:, rows] = following

    def _fork(self, rows: np.ndarray) -> list[np.ndarray]:
        """Replaces the blocks that evictions from rows will write to and that have other owners by new ones.

        The first rows are served first; a row without room is preempted.

        Returns:
          The replaced blocks, which the rows still own.
        """
        r, replaced = self.row_blocks.rows, []
        _, counts = self._kept(rows)
        needs = self._shared(rows, counts).any(axis=(0, 2))
        for nth in np.flatnonzero(needs).tolist():
            row = int(rows[nth])
            if r.alive[row] and (shared := self._make_room(row, counts[:, nth])) is not None:
                replaced.append(r.block_tables[shared[0], row, shared[1]])
                self.row_blocks.replace(row, *shared)
        return replaced

    def _shared(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns which of rows' first counts [Gk, n] blocks have other owners or are cached: boolean [Gk, n, P]."""
        ids = self.row_blocks.rows.block_tables.take(rows, axis=1)
        return (np.arange(ids.shape[2]) < counts[:, :, None]) & self.row_blocks.memory.device.is_shared(ids)

    def _make_room(self, row: int, count: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Makes room for copies of a row's first count [Gk] blocks as far as others, or the cache, own them.

        Without room, the cache gives up blocks of this row, the last ones first; then rows after it are preempted.

        Returns:
          The groups and places of the blocks to copy; None if the row itself was preempted.
        """
        r, device = self.row_blocks.rows, self.row_blocks.memory.device
        while True:
            groups, places = self._shared(np.array([row]), count[:, None])[:, 0].nonzero()
            if len(groups) <= device.pool.num_available:
                return groups, places
            ids = r.block_tables[groups, row, places]
            own = ids[device.pool.ref_count[ids] == 1]
            if len(own):
                device.forget(int(own[-1]))
                continue
            self.preempt(last := int(self.running.order[-1]))
            if last == row:
                return None


def compact(row_blocks: RowBlocks, rows: np.ndarray, kept: np.ndarray) -> None:
    """Records that the tokens which rows keep have moved to their first slots, and releases the blocks after them.

    The next tokens are stored in the slots that follow, while sequence positions continue. The rows' blocks no longer
    enter the prefix index.

    Args:
      kept: [Gk, rows] tokens that each group keeps; for one row equal modulo the block size, since all groups take
        their next blocks at the same token.
    """
    r, memory = row_blocks.rows, row_blocks.memory
    size = memory.block_size
    computed, evicted = r.num_computed[rows], r.num_evicted.take(rows, axis=1)
    assert len(kept) == 1 or not ((kept - kept[0]) % size).any(), "groups would need their next blocks apart"
    for group in range(r.num_groups):
        here = (kept[group] < computed - evicted[group]).nonzero()[0]
        if len(here):
            _shorten(row_blocks, group, rows[here], -(-kept[group, here] // size))
    r.num_evicted[:, rows] = np.maximum(evicted, computed - kept)
    r.num_rewrites += 1
    row_blocks.compacted = True
    until = computed + -kept[0] % size
    r.prefix_end[rows] += until - r.allocated_until[rows]  # the blocks taken since then stay counted
    r.allocated_until[rows] = until
    if memory.prefixes.enabled:
        for row in rows.tolist():
            seq = r.seqs[row]
            assert seq is not None
            memory.prefixes.expect_no_more(seq.kv)
            seq.kv.leave_index()
            seq.kv.cacheable = False
        r.index_at[rows] = FAR


def _shorten(row_blocks: RowBlocks, group: int, rows: np.ndarray, count: np.ndarray) -> None:
    """Shortens rows to their first blocks of a group, count [rows] of them, at positions 0, B, ...; releases the
    others."""
    r, old = row_blocks.rows, row_blocks.rows.num_blocks[group, rows]
    index = np.arange(int(old.max()), dtype=np.int32)
    which, gone = np.nonzero((index >= count[:, None]) & (index < old[:, None]))
    which = rows[which]
    row_blocks.memory.device.release(r.block_tables[group, which, gone])
    r.block_starts[group, which, gone], r.block_origins[group, which, gone] = FAR, Origin.COMPUTED
    if row_blocks.visible[group].window is not None:  # there may have been gaps
        r.block_starts[group, rows, : len(index)] = np.where(
            index < count[:, None], row_blocks.memory.block_size * index, FAR
        )
    r.num_blocks[group, rows] = count
    row_blocks.num_held -= len(which)
