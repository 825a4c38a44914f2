"""Copies the blocks that a row is about to write to and shares: with other rows, or with the cache.

A row writes to its last block. If its eviction method adds up attention, it writes scores to all of its blocks.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.state import Origin
from ksana_jax.scheduler.sequence import Rows


@dataclasses.dataclass(frozen=True)
class CopyOnWrite:
    """Copies shared blocks of rows that are marked in `Rows.forked`.

    Args:
      scored: [Gk] bool, groups of layers in which a row writes to all of its blocks, see `KVLayout.scored_groups`.
    """

    rows: Rows
    device: DeviceTier
    scored: np.ndarray

    def shared(self, rows: np.ndarray) -> np.ndarray:
        """Returns which blocks rows [n] will write to next although they have other owners, or are cached: boolean
        [Gk, n, P]. Unmarks rows without any."""
        r = self.rows
        ids, count = r.block_tables.take(rows, axis=1), r.num_blocks.take(rows, axis=1)[:, :, None]
        nth, inside = np.arange(ids.shape[2]), (r.num_computed[rows] < r.allocated_until[rows])[:, None]
        written = (nth < count) & (((nth == count - 1) & inside) | self.scored[:, None, None])
        found = written & r.forked[rows][:, None] & self.device.is_shared(ids)
        r.forked[rows] = found.any(axis=(0, 2))
        return found

    @property
    def most_copies(self) -> int:
        """Maximum number of copies that rows need for their next tokens."""
        r = self.rows
        return int(np.where(self.scored[:, None], r.num_blocks, 1)[:, r.forked].sum())

    def num_forced(self, ids: np.ndarray, groups: np.ndarray, inside: bool) -> int:
        """Returns how many of a waiting sequence's blocks must be copied before it writes to them.

        Args:
          ids: [n] its blocks, group by group; -1 for one that is not on the device yet. groups: [n] of layers.
          inside: whether its next token is stored in its last blocks.
        """
        last = np.append(groups[1:] != groups[:-1], True) & inside
        return int(np.count_nonzero((last | self.scored[groups]) & (ids >= 0) & (self.device.pool.ref_count[ids] > 1)))

    def prepare(self, row: int, room: int) -> int:
        """Returns the number of copies that a row needs before it writes.

        Args:
          room: if more copies are needed than this, the cache gives up its blocks that no other row shares.
        """
        shared = self.shared(np.array([row]))[:, 0]
        groups, places = shared.nonzero()
        if len(groups) <= room:
            return len(groups)
        ids = self.rows.block_tables[groups, row, places]
        self.device.needed_by = self.rows.seqs[row]
        for block in (own := ids[self.device.pool.ref_count[ids] == 1])[::-1].tolist():
            self.device.forget(block)
        return len(ids) - len(own)

    def copy(self, row: int) -> int:
        """Replaces the shared blocks that a row will write to by copies; returns their number. The caller has ensured
        that blocks are available."""
        r = self.rows
        groups, places = self.shared(np.array([row]))[:, 0].nonzero()
        for at in zip(groups.tolist(), [row] * len(groups), places.tolist(), strict=True):
            r.block_tables[at] = self.device.copy(int(r.block_tables[at]))
            r.block_origins[at] = Origin.COPIED
        r.forked[row] = False
        return len(groups)
