"""Snapshots of rows that evict: at the end of a prompt's context, and when a row is left.

A row's state after n tokens depends on these tokens and on its settings alone, whatever chunks and batches computed
them, so a snapshot gives the tokens that computing them again would give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.core.request import FinishReason
from ksana_jax.kv.owner import moving_blocks
from ksana_jax.kv.prefix_cache import Hit, PrefixCache
from ksana_jax.kv.snapshots import Snapshots
from ksana_jax.kv.tier import DEVICE
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.row_sharing import before
from ksana_jax.scheduler.sequence import Sequence
from ksana_jax.scheduler.step.types import ScheduledBatch


@dataclasses.dataclass(frozen=True)
class RowSnapshots:
    """Takes snapshots of rows, and starts sequences from them."""

    snapshots: Snapshots
    row_blocks: RowBlocks

    def pin(self, seq: Sequence, prefixes: PrefixCache) -> Hit | None:
        """Finds the longest snapshot of a waiting sequence's tokens, and pins it; None without any."""
        most = self._most(seq, seq.max_cached_tokens)
        if most < 1 or (found := self.snapshots.find(seq.kv, seq.token_ids[:most], seq.num_context)) is None:
            return None
        count, (nodes, starts, num_evicted) = found
        hit = Hit(nodes, starts, num_tokens=count, num_evicted=num_evicted, snapshot=True)
        prefixes.pin_found(hit)
        return hit

    def _most(self, seq: Sequence, count: int) -> int:
        """Returns how many of a sequence's tokens have a state that does not depend on which of them are output."""
        return min(count, seq.num_prompt) if self.snapshots.schedule.method.counts_outputs else count

    def plan(self, row: int) -> None:
        """Decides where the row of a sequence that starts is to take a snapshot: before its prompt's question, or its
        last token, whose logits other completions of the prompt need."""
        r = self.row_blocks.rows
        seq, schedule = r.seqs[row], self.snapshots.schedule
        assert seq is not None
        at = min(seq.num_context, seq.num_prompt - 1)
        if at > r.num_computed[row] and (schedule.method.marks_blocks or self._evicted(row, at).any()):
            r.snapshot_at[row] = at

    def _evicted(self, row: int, length: int) -> np.ndarray:
        """Returns how many tokens each group of a row has evicted after `length` tokens: [Gk]."""
        r, schedule = self.row_blocks.rows, self.snapshots.schedule
        seq = r.seqs[row]
        assert seq is not None
        if schedule.method.measures and length >= seq.num_context and (r.evict_at[:, row] > length).all():
            return r.num_evicted[:, row]
        return schedule.num_evicted(np.array([length]), np.array([seq.num_context]))[:, 0]

    def take_due(self, rows: np.ndarray) -> None:
        """Takes the planned snapshots of rows that have computed so much, and evicted what they then do."""
        r = self.row_blocks.rows
        due = rows[(r.num_computed[rows] == r.snapshot_at[rows]) & (r.num_computed[rows] < r.evict_at[:, rows]).all(0)]
        for row in due.tolist():
            r.snapshot_at[row] = FAR
            r.forked[row] |= self._take(row, int(r.num_computed[row]))

    def leave(self, rows: np.ndarray, unsettled: Seq[ScheduledBatch]) -> None:
        """Takes snapshots of rows that are about to be left.

        Args:
          unsettled: steps that may compute tokens of these rows, and that the device will make.
        """
        r, row_blocks = self.row_blocks.rows, self.row_blocks
        for row in rows.tolist():
            seq = r.seqs[row]
            assert seq is not None
            if seq.is_beam or seq.kv.swapped is not None or seq.finish_reason is FinishReason.ERROR or row in r.probes:
                continue
            computed = int(r.num_computed[row])
            if self.snapshots.schedule.method.adds_up:  # what a step adds to scores stays
                computed += sum(_counted(batch, row) for batch in unsettled)
            known = min(computed, int(r.num_known[row]))
            if known == computed or not (self.snapshots.schedule.method.adds_up or row_blocks.windowed):
                self._take(row, known)

    def _take(self, row: int, length: int) -> bool:
        """Takes a snapshot of a row after `length` tokens, if it holds what a row then has; returns whether it did."""
        r, memory = self.row_blocks.rows, self.row_blocks.memory
        seq = r.seqs[row]
        assert seq is not None
        method, evicted = self.snapshots.schedule.method, r.num_evicted[:, row]
        if method.hides:  # a row whose next eviction is due has made those before
            waits = (r.num_computed[row] >= r.evict_at[:, row]).any()
            evicted = self._evicted(row, int(r.num_computed[row]) - waits)
        if not (method.marks_blocks or evicted.any()) or length > self._most(seq, length):
            return False  # the first is a matter of the prefix index
        if length < 1 or (evicted != self._evicted(row, length)).any():
            return False
        held, alive = before(self.row_blocks, row, length), np.ones(0, bool)
        for group, live in enumerate(self.row_blocks.visible):  # a step's last blocks may not have been returned yet
            starts = held.starts[held.groups == group]
            dead = live.window is not None and live.dead_blocks(starts, memory.block_size, length)
            alive = np.append(alive, ~(np.zeros(len(starts), bool) | dead))
        held = held._replace(ids=held.ids[alive], starts=held.starts[alive], groups=held.groups[alive])
        if not moving_blocks(memory, DEVICE).isdisjoint(held.ids.tolist()):
            return False
        return self.snapshots.keep(seq.kv, r.token_ids[row, :length], seq.num_context, held)


def _counted(batch: ScheduledBatch, row: int) -> int:
    """Returns the tokens of a row in a step that has not advanced."""
    if batch.advanced or row in batch.gone:
        return 0
    return int(batch.num_per_row[batch.rows == row].sum())
