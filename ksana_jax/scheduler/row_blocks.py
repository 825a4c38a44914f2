"""The blocks of running rows: allocated as rows grow, copied before a write if shared, released when rows end.

Vectorised over rows; does not decide which rows run."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.state import HeldBlocks, Origin
from ksana_jax.scheduler.copy_on_write import CopyOnWrite
from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.step.types import NewBlocks


class RowBlocks:
    """Fills the block tables of `rows` from `memory`.

    Args:
      layout: which positions stay visible to later tokens, in each group of layers, and when rows evict.

    Attributes:
      num_held: blocks that rows hold, a shared one once for each row. num_ahead: those among them that begin after the
        computed tokens of their row: taken for a step that is scheduled.
      windowed: live ranges whose blocks rows return before they end, each with its groups.
      compacted: True once text and cache positions of some row may differ. copying: copies shared blocks before writes.
    """

    def __init__(self, rows: Rows, memory: KVMemory, layout: KVLayout):
        self.rows, self.memory = rows, memory
        self._eviction = layout.eviction
        self.visible = [group.live for group in layout.groups]
        # Groups with the same live range hold blocks of the same positions, so these are examined once for all of them.
        self.windowed = [
            (live, np.array([group for group, other in enumerate(self.visible) if other == live]))
            for live in dict.fromkeys(self.visible)
            if live.window is not None
        ]
        self._size = memory.block_size
        self.num_held = self.num_ahead = 0
        self.compacted = False
        self._groups = np.arange(rows.num_groups)[:, None]
        self.copying = CopyOnWrite(rows, memory.device, layout.scored_groups)

    def fill(self, row: int, seq: Sequence, held: HeldBlocks, forked: bool) -> None:
        """Puts a sequence's blocks, and the tokens computed in them, into an empty row."""
        r = self.rows
        if held.num_computed:
            self._put(row, seq, held)
        if self._eviction is not None:
            prompt = np.array([seq.num_context])
            r.evict_at[:, row] = self._eviction.next_at(np.array([held.num_computed]), prompt)[:, 0]
            r.budgets[:, row] = budgets = self._eviction.budgets(prompt)[:, 0]
            r.num_recent[:, row] = self._eviction.num_recent(budgets)
            seq.kv.cacheable &= not self._eviction.method.marks_blocks
        r.forked[row] = forked
        if self.memory.prefixes.enabled and seq.kv.cacheable:
            r.index_at[row] = (seq.kv.num_indexed + 1) * self._size
            self.memory.prefixes.expect(seq.kv, seq.token_ids)

    def _put(self, row: int, seq: Sequence, held: HeldBlocks) -> None:
        r = self.rows
        origins = np.broadcast_to(np.asarray(held.origins, np.uint8), len(held.ids))
        for group in range(r.num_groups):
            mine = held.groups == group
            r.num_blocks[group, row] = count = np.count_nonzero(mine)
            r.block_tables[group, row, :count] = held.ids[mine]
            r.block_starts[group, row, :count] = held.starts[mine]
            r.block_origins[group, row, :count] = origins[mine]
        self.num_held += len(held.ids)
        r.num_computed[row], r.num_evicted[:, row] = held.num_computed, held.num_evicted
        r.allocated_until[row] = r.prefix_end[row] = held.allocated_until(self._size)
        for origin, number in enumerate(np.bincount(origins).tolist()):
            if number:
                self._note(seq, Origin(origin), number)
        if np.any(held.num_evicted):
            seq.kv.cacheable, self.compacted = False, True

    def take(self, rows: np.ndarray) -> NewBlocks:
        """Allocates one block of each group for each of some rows; the caller has made sure of room."""
        r, until = self.rows, self.rows.allocated_until[rows]
        # Indices of flat arrays: NumPy takes three times as long for an index of three axes.
        of_group = rows if r.num_groups == 1 else (self._groups * len(r.seqs) + rows).reshape(-1)
        entries = r.num_blocks.reshape(-1)[of_group]
        at, starts = of_group * r.block_tables.shape[2] + entries, until
        if r.num_groups > 1 or self.compacted:
            starts = (until - r.num_evicted.take(rows, axis=1)).reshape(-1)
        self.memory.device.needed_by = r.seqs[rows[0]]
        ids = self.memory.device.allocate(len(at))
        r.block_tables.reshape(-1)[at], r.block_starts.reshape(-1)[at] = ids, starts
        r.num_blocks.reshape(-1)[of_group] = entries + 1
        r.allocated_until[rows] = until + self._size
        self._took(len(at))
        return NewBlocks(of_group, entries, ids, starts)

    def _take_several(self, row: int, count: int) -> None:
        """Allocates `count` blocks of each group for one row; see `take`."""
        r, until = self.rows, int(self.rows.allocated_until[row])
        end = until + self._size * count
        ids = self.memory.device.allocate(r.num_groups * count).reshape(r.num_groups, count)
        for group, held in enumerate(r.num_blocks[:, row].tolist()):
            evicted, new = int(r.num_evicted[group, row]), slice(held, held + count)
            r.block_tables[group, row, new] = ids[group]
            r.block_starts[group, row, new] = np.arange(until - evicted, end - evicted, self._size)
        r.num_blocks[:, row] += count
        r.allocated_until[row] = end
        self._took(r.num_groups * count)

    def _took(self, count: int) -> None:
        self.num_held += count
        self.num_ahead += count

    def provide(self, row: int, count: int) -> None:
        """Prepares a row to write `count` tokens: copies the blocks that it shares, and allocates new ones; the caller
        has ensured that they are available."""
        r = self.rows
        r.num_rewrites += 1
        self.memory.device.needed_by = r.seqs[row]
        if r.forked[row] and (copied := self.copying.copy(row)):
            self._note(r.seqs[row], Origin.COPIED, copied)
        end = int(r.num_computed[row]) + count
        if new := -(-max(end - int(r.allocated_until[row]), 0) // self._size):
            self._take_several(row, new)

    def replace(self, row: int, groups: np.ndarray, places: np.ndarray) -> None:
        """Replaces a row's blocks at some places of its tables; the caller has ensured that new ones are available, and
        releases the old ones."""
        r = self.rows
        r.block_tables[groups, row, places] = self.memory.device.allocate(len(groups))
        r.block_origins[groups, row, places] = Origin.COPIED
        self._note(r.seqs[row], Origin.COPIED, len(groups))

    def extend(self, row: int, most: int) -> int:
        """Allocates blocks for as many of a row's next `most` tokens as possible; returns the number of tokens."""
        r, allocated = self.rows, int(self.rows.allocated_until[row] - self.rows.num_computed[row])
        available = self.memory.blocks.num_available
        if r.forked[row]:
            wanted = -(-max(most - allocated, 0) // self._size) * r.num_groups
            available -= self.copying.prepare(row, available - wanted)
        if (count := min(most, allocated + available // r.num_groups * self._size)) > 0:
            self.provide(row, count)
        return max(count, 0)

    def num_next_blocks(self, rows: np.ndarray | int) -> int:
        """Returns the blocks that rows, or one, allocate next: one per group for each that will outgrow its blocks."""
        r = self.rows
        grows = r.allocated_until[rows] < r.max_len[rows] - 1  # the last token is never computed
        return r.num_groups * int(np.count_nonzero(grows))

    def release(self, rows: np.ndarray) -> None:
        """Releases all blocks of some rows."""
        r = self.rows
        ids = np.concatenate([r.block_ids(row) for row in rows])
        self.memory.device.release(ids)
        self.num_held -= len(ids)
        for row in rows.tolist():
            self._note(r.seqs[row], Origin.COMPUTED, self._num_taken(row))
            self.num_ahead -= int(r.allocated_until[row] - r.num_computed[row]) // self._size * r.num_groups

    def _num_taken(self, row: int) -> int:
        """Returns the number of blocks that a row has allocated since it was placed."""
        r = self.rows
        return int(r.allocated_until[row] - r.prefix_end[row]) // self._size * r.num_groups

    def _note(self, seq: Sequence | None, origin: Origin, count: int = 1) -> None:
        assert seq is not None
        for totals in (seq.kv.num_blocks_by_origin, self.memory.num_blocks_by_origin):
            totals[origin.label] = totals.get(origin.label, 0) + count
