"""Admits waiting sequences to the rest of a step: which can start, their rows and first chunks. Preempts none."""

from __future__ import annotations

import dataclasses

import numpy as np

from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_cache import Hit
from ksana_jax.kv.state import HeldBlocks
from ksana_jax.scheduler.budget import StepBudget
from ksana_jax.scheduler.queue import WaitingQueue
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.running import Running
from ksana_jax.sequence import Sequence

# Waiting sequences that are looked at in a step although one before them waits for a prefix or the disk.
LOOKAHEAD = 16


@dataclasses.dataclass(frozen=True)
class Admission:
    """Moves sequences from `queue` to rows of `running`, with blocks from `memory` in the tables of `row_blocks`.

    Args:
      layout: which positions stay visible to later tokens, in each group of layers.
      longest_chunk: most tokens of a step.
    """

    memory: KVMemory
    queue: WaitingQueue
    running: Running
    row_blocks: RowBlocks
    layout: KVLayout
    longest_chunk: int

    def admit(self, budget: StepBudget, computing: np.ndarray) -> list[tuple[int, int]]:
        """Places waiting sequences in rows, in order, as long as the budget lasts.

        The next blocks of the rows that compute in this step stay free: taken by a newcomer, they would soon be taken
        from it again, with all that it has computed. Waiting rows (beams) reserve none, so something always computes.

        A sequence that waits for a prefix that a running row is computing, or for the disk, lets others pass: neither
        takes long, and neither depends on those who pass.

        Args:
          computing: rows that compute in this step.

        Returns:
          The new rows, each with the number of its tokens that this step computes.
        """
        queue, prefixes = self.queue, self.memory.prefixes
        admitted: list[tuple[int, int]] = []
        at, reserve = 0, self.row_blocks.num_next_blocks(computing)
        while at < min(len(queue.entries), LOOKAHEAD) and self.running.has_free_row and budget.tokens:
            seq = queue.entries[at][2]
            if seq.awaits_token or not self.memory.disk_reads.ready(seq.kv):
                at += 1
                continue
            hit = None if seq.kv.held else prefixes.pin(seq.kv, seq.token_ids, seq.max_cached_tokens)
            if hit and hit.awaits:
                at += 1
                continue
            alone = not len(self.running.order)
            if not self._fits(seq, hit, budget, alone, reserve):
                if hit:
                    prefixes.unpin(hit)
                if not alone or not seq.kv.shared:
                    break
                queue.take_away(seq)  # no room for a copy of what it shares
                continue
            row = self._place(at, hit)
            budget.take(count := self.row_blocks.extend(row, budget.most(self.row_blocks.rows.next_chunk(row))))
            admitted.append((row, count))
            reserve += self.row_blocks.num_next_blocks(row)
        return admitted

    def _fits(self, seq: Sequence, hit: Hit | None, budget: StepBudget, alone: bool, reserve: int) -> bool:
        """Whether a waiting sequence can start: whether the blocks it holds and its first chunk fit.

        Args:
          hit: its cached prefix, pinned.
          alone: nothing runs; then part of a chunk is better than waiting for ever, and other waiting sequences give up
            the blocks that they share.
          reserve: blocks that stay free for the running rows.
        """
        device, size, total = self.memory.device, self.memory.block_size, len(seq.token_ids)
        kv, held = seq.kv, seq.kv.held
        done = hit.num_tokens if hit else held.num_computed if held else 0
        left = total - done
        if not budget.most(left):
            return False
        loads = hit.num_loads if hit else len(kv.swapped.ids) if kv.swapped else 0
        # One that was preempted starts when all its tokens fit, or it would soon be preempted again.
        count = left if seq.num_preemptions and not alone else budget.most(left)
        allocated = held.allocated_until(size) if held else done
        num_groups = len(self.layout.groups)

        def first_blocks() -> int:
            """Returns the number of blocks that the first token needs."""
            if done >= allocated:
                return loads + num_groups
            return loads + (0 if kv.shared is None else self._num_shared(kv.shared))

        more = (-(-max(done + count - allocated, 0) // size) - (done >= allocated)) * num_groups
        # A fork goes on with what its parent holds: it waits for no reserve.
        room = device.num_available - (0 if kv.shared else reserve)
        if first_blocks() + more <= room or self.layout.blocks_of(total, self.longest_chunk, seq.num_context) <= room:
            return True
        if not alone:
            return False
        while first_blocks() > device.num_available:
            if not self.queue.reclaim_shared(seq):
                return False
        return True

    def _num_shared(self, held: HeldBlocks) -> int:
        """Returns how many of a sequence's last blocks, one per group, must be copied before it writes to them."""
        last = [held.ids[held.groups == group][-1] for group in range(len(self.layout.groups))]
        return sum(map(self.memory.device.is_shared, last))

    def _place(self, at: int, hit: Hit | None) -> int:
        """Places a waiting sequence in a row with the blocks that it holds; returns the row."""
        rank, seq_id, seq = self.queue.entries.pop(at)
        row, kv = self.running.enter((rank, seq_id)), seq.kv
        if hit:
            held = self.memory.prefixes.claim(kv, hit, len(seq.token_ids))
        elif kv.swapped:
            held = kv.swapped._replace(ids=self.memory.swap.move_in(kv.swapped.ids))
        else:
            assert kv.shared is not None
            held = kv.shared
        forked = kv.shared is not None
        kv.shared = kv.swapped = None
        kv.has_read, kv.read = False, set()
        self.memory.disk_reads.end(kv)
        self.row_blocks.rows.place(seq, row)
        self.row_blocks.fill(row, seq, held, forked)
        return row
