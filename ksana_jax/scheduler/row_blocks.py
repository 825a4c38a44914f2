"""The blocks that running rows hold: taken as they grow, copied before a shared one is written to, made findable when
they are full, returned when nobody will see them. Vectorised over rows; decides nothing about who runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import Owner
from ksana_jax.kv.state import HeldBlocks, Origin
from ksana_jax.kv.tier import DEVICE
from ksana_jax.patterns import FAR, LiveRange
from ksana_jax.sequence import Rows, Sequence


class RowBlocks:
    """Block tables of `rows`, filled from `memory`.

    Args:
      live: which positions stay visible to later tokens.
    """

    def __init__(self, rows: Rows, memory: KVMemory, live: LiveRange):
        self.rows, self.memory, self.live = rows, memory, live
        self._size = memory.block_size

    def bring(self, row: int, seq: Sequence, held: HeldBlocks, forked: bool) -> None:
        """Gives a row that holds nothing some blocks and the tokens computed in them."""
        r, count = self.rows, len(held.ids)
        r.block_tables[row, :count], r.block_starts[row, :count] = held.ids, held.starts
        r.num_blocks[row], r.num_computed[row] = count, held.num_computed
        r.covered[row] = r.brought[row] = -(-held.num_computed // self._size) * self._size
        r.block_origins[row, :count] = held.origins
        for origin, number in enumerate(np.bincount(r.block_origins[row, :count]).tolist()):
            if number:
                self._note(seq, Origin(origin), number)
        r.forked[row] = forked
        if self.memory.prefixes.enabled:
            r.index_at[row] = (seq.kv.num_indexed + 1) * self._size if seq.kv.cacheable else FAR
            self.memory.prefixes.expect(seq.kv, seq.token_ids)

    def take(self, rows: np.ndarray, count: int = 1) -> None:
        """Gives `count` blocks to each of some rows; there are enough."""
        if not len(rows):
            return
        r, size = self.rows, self._size
        ids = self.memory.device.allocate(len(rows) * count).reshape(len(rows), count)
        at = r.num_blocks[rows][:, None] + np.arange(count, dtype=np.int32)
        r.block_tables[rows[:, None], at] = ids
        r.block_starts[rows[:, None], at] = r.covered[rows][:, None] + size * np.arange(count, dtype=np.int32)
        r.num_blocks[rows] += count
        r.covered[rows] += size * count

    def writes_to_shared(self, rows: np.ndarray) -> np.ndarray:
        """Which rows are about to write to a block that is not theirs alone: boolean [rows]."""
        r = self.rows
        forked = r.forked[rows]
        if not forked.any():
            return forked
        inside = r.num_computed[rows] < r.covered[rows]
        last = r.block_tables[rows, np.maximum(r.num_blocks[rows] - 1, 0)]
        shared = inside & ((self.memory.blocks.ref_count[last] > 1) | self.memory.blocks.kept[last])
        r.forked[rows] = forked & shared
        return forked & shared

    def provide(self, row: int, count: int) -> None:
        """Gives a row what it needs to write `count` tokens: a copy of its last block where that is shared, and new
        ones; there is room."""
        r, one = self.rows, np.array([row])
        if r.forked[row] and self.writes_to_shared(one)[0]:
            at = r.num_blocks[row] - 1
            r.block_tables[row, at] = self.memory.device.copy(int(r.block_tables[row, at]))
            r.forked[row] = False
            r.block_origins[row, at] = Origin.COPIED
            self._note(r.seqs[row], Origin.COPIED)
        end = int(r.num_computed[row]) + count
        if new := -(-max(end - int(r.covered[row]), 0) // self._size):
            self.take(one, new)

    def share(self, row: int, num_tokens: int) -> HeldBlocks:
        """The blocks of a row's first tokens, with one more owner each."""
        r = self.rows
        starts = r.block_starts[row, : r.num_blocks[row]]
        some = starts < num_tokens
        ids = r.block_ids(row)[some].copy()
        self.memory.device.share(ids)
        r.forked[row] = True
        return HeldBlocks(ids, starts[some].copy(), num_tokens, Origin.SHARED)

    def swap_out(self, row: int) -> HeldBlocks | None:
        """Slots of the host to which a row's computed blocks will move; None where computing them again is better."""
        r = self.rows
        done, starts = int(r.num_computed[row]), r.block_starts[row, : r.num_blocks[row]]
        filled = starts < done
        if not done or not self.memory.swap.is_better(int(np.count_nonzero(filled)), done):
            return None
        return HeldBlocks(
            self.memory.swap.move_out(r.block_ids(row)[filled]), starts[filled].copy(), done, Origin.SWAPPED
        )

    def release(self, rows: np.ndarray) -> None:
        """Gives back all that some rows hold."""
        r = self.rows
        self.memory.device.release(np.concatenate([r.block_ids(row) for row in rows]))
        taken = (r.covered[rows] - r.brought[rows]) // self._size
        for row, count in zip(rows.tolist(), taken.tolist(), strict=True):
            self._note(r.seqs[row], Origin.COMPUTED, count)

    def _note(self, seq: Sequence | None, origin: Origin, count: int = 1) -> None:
        assert seq is not None
        for totals in (seq.kv.num_blocks_by_origin, self.memory.num_blocks_by_origin):
            totals[origin.label] = totals.get(origin.label, 0) + count

    def index_full(self, rows: np.ndarray) -> None:
        """Makes blocks findable that a step has filled."""
        r, size = self.rows, self._size
        for row in rows[r.num_computed[rows] >= r.index_at[rows]].tolist():
            seq = r.seqs[row]
            assert seq is not None
            starts = np.arange(seq.kv.num_indexed, int(r.num_computed[row]) // size, dtype=np.int32) * size
            held = r.block_starts[row, : r.num_blocks[row]]
            at = np.searchsorted(held, starts)
            found = at < len(held)
            found[found] = held[at[found]] == starts[found]
            ids = np.full(len(starts), -1, np.int32)
            ids[found] = r.block_tables[row, at[found]]
            kept = self.memory.prefixes.insert(seq.kv, r.token_ids[row], ids.tolist())
            r.block_tables[row, at[found]] = np.array(kept, np.int32)[found]
            self.memory.device.release(ids[found & (ids != kept)])
            r.index_at[row] = (seq.kv.num_indexed + 1) * size if seq.kv.cacheable else FAR

    def return_invisible(self, rows: np.ndarray) -> None:
        """Returns blocks of which no later query of their row sees a token."""
        if self.live.window is None:
            return
        r, size = self.rows, self._size
        # Block size 4, window 4: block 0..3 leaves the window of query 7, block 4..7 that of query 11.
        seen_from = r.num_computed[rows] - self.live.window + 1
        due = seen_from >= r.return_at[rows]
        if not due.any():
            return
        rows = rows[due]
        r.return_at[rows] = (seen_from[due] // size + 1) * size
        width = int(r.num_blocks[rows].max())
        starts = r.block_starts[rows, :width]
        dead = self.live.dead_blocks(starts, size, r.num_computed[rows][:, None])
        some = dead.any(axis=1)
        if not some.any():
            return
        rows, dead = rows[some], dead[some]
        tables = r.block_tables[rows, :width]
        self.memory.device.release(tables[dead])
        order = np.argsort(dead, axis=1, kind="stable")  # the living move up
        r.block_tables[rows, :width] = np.take_along_axis(tables, order, axis=1)
        r.block_starts[rows, :width] = np.take_along_axis(np.where(dead, FAR, starts[some]), order, axis=1)
        origins = np.where(dead, np.uint8(Origin.COMPUTED), r.block_origins[rows, :width])
        r.block_origins[rows, :width] = np.take_along_axis(origins, order, axis=1)
        r.num_blocks[rows] -= dead.sum(axis=1, dtype=np.int32)

    def owners(self, rows: list[int]) -> Iterator[Owner]:
        """Rows as owners of blocks."""
        r = self.rows
        for row in rows:
            seq, some = r.seqs[row], slice(r.num_blocks[row])
            assert seq is not None
            yield Owner(seq.request_id, seq.index, "runs", DEVICE, r.block_tables[row, some],
                        r.block_starts[row, some], int(r.num_computed[row]), r.block_origins[row, some])  # fmt: skip

    def check(self, rows: list[int]) -> None:
        """Holds tables against what their rows have computed and what they will see.

        Raises:
          AssertionError: a block that is needed is missing, or one that is about to be written to is shared.
        """
        r, size = self.rows, self._size
        for row in rows:
            starts = r.block_starts[row, : r.num_blocks[row]]
            assert (np.diff(starts) > 0).all(), "blocks are out of order"
            assert r.num_computed[row] <= r.covered[row], "computed tokens without a block"
            positions = np.arange(0, r.covered[row], size)
            alive = ~self.live.dead_blocks(positions, size, r.num_computed[row])
            assert set(positions[alive].tolist()) <= set(starts.tolist()), "a visible block was returned"
            if r.num_computed[row] < r.covered[row] and not r.forked[row]:
                last = r.block_tables[row, r.num_blocks[row] - 1]
                own = self.memory.blocks.ref_count[last] == 1 and not self.memory.blocks.kept[last]
                assert own, "a block that will be written to has other owners"
