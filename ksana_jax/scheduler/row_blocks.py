"""The blocks of running rows: allocated as rows grow, copied before a write if shared, cached when full, returned when
no longer visible. Vectorised over rows; does not decide which rows run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ksana_jax.core.patterns import FAR, LiveRange
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import Owner
from ksana_jax.kv.state import HeldBlocks, Origin
from ksana_jax.kv.tier import DEVICE
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
      compacted: True once text and cache positions of some row may differ.
      copying: copies shared blocks before a row writes to them.
    """

    def __init__(self, rows: Rows, memory: KVMemory, layout: KVLayout):
        self.rows, self.memory = rows, memory
        self._eviction = layout.eviction
        self.lives = [group.live for group in layout.groups]
        # Groups with the same live range hold blocks of the same positions, so these are examined once for all of them.
        self._windowed = [
            (live, np.array([group for group, other in enumerate(self.lives) if other == live]))
            for live in dict.fromkeys(self.lives)
            if live.window is not None
        ]
        self._size = memory.block_size
        self.num_held = self.num_ahead = 0
        self.compacted = False
        self._groups = np.arange(rows.num_groups)[:, None]
        self.copying = CopyOnWrite(rows, memory.device, layout.scored_groups)

    @property
    def has_windows(self) -> bool:
        """True if rows return blocks before they end."""
        return bool(self._windowed)

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
        available = self.memory.device.num_available
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

    def trim(self, rows: np.ndarray, num_left: np.ndarray | int = 0) -> None:
        """Releases the blocks of rows [n] that begin after their computed tokens and num_left [n] more: those taken for
        draft tokens that were rejected, or not drafted."""
        r, size = self.rows, self._size
        extra = r.allocated_until[rows] - r.num_computed[rows] - num_left
        for row, count in zip(rows[extra >= size].tolist(), (extra // size)[extra >= size].tolist(), strict=True):
            for group, held in enumerate(r.num_blocks[:, row].tolist()):
                dropped = slice(held - count, held)
                self.memory.device.release(r.block_tables[group, row, dropped].copy())
                r.block_starts[group, row, dropped] = FAR
                r.block_tables[group, row, dropped] = 0
            r.num_blocks[:, row] -= count
            r.allocated_until[row] -= count * size
            r.num_rewrites += 1
            self.num_held -= r.num_groups * count
            self.num_ahead -= r.num_groups * count

    def share(self, row: int, num_tokens: int) -> HeldBlocks:
        """Adds an owner to the blocks of a row's first tokens, and returns them."""
        held = self.before(row, num_tokens)
        assert num_tokens == self.rows.num_computed[row] or not np.any(held.num_evicted), "the beginning is missing"
        self.memory.device.share(held.ids)
        self.rows.forked[row] = True
        return held._replace(origins=Origin.SHARED)

    def before(self, row: int, num_tokens: int) -> HeldBlocks:
        """Returns a row's blocks that begin before a text position, which is after its last eviction."""
        r = self.rows
        evicted = r.num_evicted[:, row].copy()
        starts, groups = r.of_blocks(r.block_starts, row), np.repeat(np.arange(r.num_groups), r.num_blocks[:, row])
        some = starts < num_tokens - evicted[groups]
        return HeldBlocks(r.block_ids(row)[some], starts[some], groups[some], num_tokens, num_evicted=evicted)

    def swap_out(self, row: int) -> HeldBlocks | None:
        """Swaps a row's computed blocks to the host and returns their slots; None if recomputation is better."""
        swap, r = self.memory.swap, self.rows
        if swap is None or row in r.probes or (r.num_computed[row] >= r.evict_at[:, row]).any():  # it could not evict
            return None
        filled = self.before(row, int(r.num_computed[row]))
        if not filled.num_computed or not swap.is_better(len(filled.ids), filled.num_computed):
            return None
        return filled._replace(ids=swap.move_out(filled.ids), origins=Origin.SWAPPED)

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

    def index_full(self, rows: np.ndarray) -> None:
        """Adds the blocks that a step has filled to the prefix index."""
        r, size = self.rows, self._size
        # Later steps may have advanced: they compute tokens that this step, or one of them, has sampled.
        computed = np.minimum(r.num_computed[rows], r.num_known[rows] - ~r.is_beam[rows])
        due = computed >= r.index_at[rows]
        if not np.count_nonzero(due):
            return
        rows, computed = rows[due], computed[due]
        states = [seq.kv for row in rows.tolist() if (seq := r.seqs[row]) is not None]
        first = np.array([state.num_indexed for state in states])
        count = computed // size - first
        ends = np.cumsum(count)
        which = np.repeat(np.arange(len(rows)), count)
        nth = np.arange(len(which)) + (first - ends + count)[which]
        at = self._find(rows, which, nth * size)
        ids = np.where(at < 0, -1, r.block_tables[self._groups, rows[which], at])
        lists, kept = ids.tolist(), [[] for _ in range(r.num_groups)]
        for row, state, end, number in zip(rows.tolist(), states, ends.tolist(), count.tolist(), strict=True):
            mine = [of_group[end - number : end] for of_group in lists]
            for group, of_group in enumerate(self.memory.prefixes.insert(state, r.token_ids[row], mine)):
                kept[group] += of_group
        if kept != lists:
            kept = np.array(kept, np.int32)
            group, place = np.nonzero(ids != kept)
            r.block_tables[group, rows[which[place]], at[group, place]] = kept[group, place]
            r.num_rewrites += 1
            self.memory.device.release(ids[group, place])
        r.index_at[rows] = [(state.num_indexed + 1) * size if state.cacheable else FAR for state in states]

    def _find(self, rows: np.ndarray, which: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Returns where tables have the blocks of some text positions: [Gk, n]; -1 if a row does not hold the block.

        Args:
          which: [n] index in `rows` of each block's row. starts: [n] text position of its first token.
        """
        r, width = self.rows, self.rows.block_starts.shape[2]
        if not self._windowed:  # nothing was returned
            return 0 * self._groups + starts // self._size
        # One search in one sorted list: each table starts beyond all positions of the previous one.
        tables = np.arange(r.num_groups * len(rows)).reshape(r.num_groups, -1)
        held = (r.block_starts.take(rows, axis=1) + (FAR + 1) * tables[:, :, None]).ravel()
        table = tables.take(which, axis=1)
        wanted = starts + (FAR + 1) * table
        at = np.minimum(held.searchsorted(wanted), len(held) - 1)
        return np.where(held[at] == wanted, at - width * table, -1)

    def return_invisible(self, rows: np.ndarray) -> None:
        """Releases blocks that no later query of their row sees."""
        for live, groups in self._windowed:
            self._return_invisible(live, groups, rows)

    def _return_invisible(self, live: LiveRange, groups: np.ndarray, rows: np.ndarray) -> None:
        r, size, first = self.rows, self._size, groups[0]
        # Block size 4, window 4: block 0..3 leaves the window of query 7, block 4..7 the window of query 11.
        computed = r.num_computed[rows] - r.num_evicted[first, rows]
        seen_from = live.seen_from(computed)
        due = seen_from >= r.return_at[first, rows]
        if not np.count_nonzero(due):
            return
        rows, computed = rows[due], computed[due]
        r.return_at[first, rows] = (seen_from[due] // size + 1) * size
        width = int(r.num_blocks[first, rows].max())
        starts = r.block_starts[first, rows, :width]
        dead = live.dead_blocks(starts, size, computed[:, None])
        count = dead.sum(axis=1, dtype=np.int32)
        if not np.count_nonzero(count):
            return
        order = np.argsort(dead, axis=1, kind="stable")  # live blocks move up, dead ones go to the end
        tail = slice(width - int(count.max()), width)
        is_dead = np.arange(tail.start, width) >= (width - count)[:, None]
        at = rows[:, None] * r.block_tables.shape[2] + order
        of_groups = r.block_tables.reshape(r.num_groups, -1), r.block_origins.reshape(r.num_groups, -1)
        tables, origins = (values.take(at, axis=1)[groups] for values in of_groups)
        starts = starts[np.arange(len(rows))[:, None], order]
        self.memory.device.release(dropped := tables[:, :, tail][:, is_dead].ravel())
        self.num_held -= len(dropped)
        starts[:, tail][is_dead], origins[:, :, tail][:, is_dead] = FAR, Origin.COMPUTED
        here = groups[:, None], rows
        r.num_rewrites += 1
        r.num_blocks[here] -= count
        for column, values in ((r.block_tables, tables), (r.block_starts, starts), (r.block_origins, origins)):
            column[*here, :width] = values

    def owners(self, rows: list[int]) -> Iterator[Owner]:
        """Yields rows as owners of blocks."""
        r = self.rows
        for row in rows:
            seq = r.seqs[row]
            assert seq is not None
            ids, starts, origins = (r.of_blocks(x, row) for x in (r.block_tables, r.block_starts, r.block_origins))
            cached = np.repeat(r.num_computed[row] - r.num_evicted[:, row], r.num_blocks[:, row])
            yield Owner(seq.request_id, seq.index, "runs", DEVICE, ids, starts, cached, origins)
