"""Waiting sequences: their queue, and their admission to the remaining budget of a step. Preempts none."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_cache import Hit
from ksana_jax.kv.state import HeldBlocks
from ksana_jax.kv.tier import DEVICE
from ksana_jax.scheduler.policies import SchedulingPolicy
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.row_eviction import RowEviction
from ksana_jax.scheduler.row_states import RowStates
from ksana_jax.scheduler.running import Running, StepBudget
from ksana_jax.scheduler.sequence import Sequence

# Maximum waiting sequences examined in a step behind one that waits for a prefix or the disk.
LOOKAHEAD = 16


def fcfs(seq: Sequence) -> float:
    """Serves requests in order of arrival, so no request starves: the default policy."""
    return seq.seq_id


class WaitingQueue:
    """Holds the waiting sequences of a scheduler.

    Attributes:
      entries: (rank, seq_id, sequence), sorted; preempted ones return to their place.
      leaders: sequences whose forks wait until they have computed their prompt; these forks are not in the queue yet.
    """

    def __init__(self, memory: KVMemory, policy: SchedulingPolicy):
        self._memory, self._policy = memory, policy
        self._reorder: Callable[[list[Sequence], KVMemory], None] | None = getattr(policy, "reorder", None)
        self.entries: list[tuple[Any, int, Sequence]] = []
        self.leaders: dict[Sequence, None] = {}

    def rank(self, seq: Sequence) -> None:
        """Asks the policy for a sequence's rank, once; a policy may be a user's own and raise anything."""
        if seq.rank is None:
            seq.rank = self._policy.rank(seq)

    def reorder(self) -> None:
        """Lets a policy that has `reorder` rank the waiting sequences again."""
        if self._reorder is not None and self.entries:
            waiting = [seq for _, _, seq in self.entries]
            self._reorder(waiting, self._memory)
            self.entries = sorted((seq.rank, seq.seq_id, seq) for seq in waiting)

    def add(self, seq: Sequence) -> None:
        """Inserts a sequence by rank."""
        self.rank(seq)
        if seq.forks:
            self.leaders[seq] = None
        bisect.insort(self.entries, (seq.rank, seq.seq_id, seq))

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out of the queue and releases its blocks."""
        self.entries = [entry for entry in self.entries if entry[2] is not seq]
        if self._memory.disk_reads is not None:
            self._memory.disk_reads.end(seq.kv)
        self.take_away(seq)

    def take_away(self, seq: Sequence) -> None:
        """Releases the blocks that a waiting sequence holds; it recomputes them if it runs."""
        kv = seq.kv
        if kv.shared is not None:
            self._memory.device.release(kv.shared.ids)
        if kv.swapped is not None:
            assert self._memory.swap is not None
            self._memory.swap.discard(kv.swapped.ids)
        if self._memory.states is not None:
            self._memory.states.take_away(kv)
        kv.shared = kv.swapped = None
        kv.num_indexed = 0
        kv.nodes.clear()

    def reclaim_shared(self, spared: Sequence | None = None) -> bool:
        """Releases the shared blocks of the last waiting sequence that holds some; False if none does."""
        for _, _, seq in reversed(self.entries):
            if seq.kv.shared is not None and seq is not spared:
                self.take_away(seq)
                return True
        return False

    def pop_forks(self, leader: Sequence) -> list[Sequence]:
        """Removes and returns the unfinished sequences that waited for a leader's prompt."""
        self.leaders.pop(leader, None)
        forks, leader.forks = leader.forks, []
        return [seq for seq in forks if seq.finish_reason is None]


@dataclasses.dataclass(frozen=True)
class Admission:
    """Moves sequences from `queue` to rows of `running`, with blocks from `memory` in the tables of `row_blocks`.

    Args:
      layout: which positions stay visible to later tokens, in each group of layers.
      longest_chunk: maximum tokens of a step. eviction: from rows, and snapshots of them; None without.
      states: of rows, in recurrent layers; None without.
    """

    memory: KVMemory
    queue: WaitingQueue
    running: Running
    row_blocks: RowBlocks
    layout: KVLayout
    longest_chunk: int
    eviction: RowEviction | None
    states: RowStates | None = None

    def admit(self, budget: StepBudget, computing: np.ndarray) -> list[tuple[int, int]]:
        """Places waiting sequences in rows, in order, as long as the budget lasts.

        The next blocks of the rows that compute in this step stay free: a newcomer that took them would soon be
        preempted and lose everything it has computed. Waiting rows (beams) reserve none, so something always computes.

        A sequence that waits for a prefix that a running row is computing, or for the disk, lets others pass: neither
        takes long, and neither depends on the sequences that pass. One that waits for a slot for its adapter lets those
        without adapters pass; others would keep the slots busy.

        Args:
          computing: rows that compute in this step.

        Returns:
          The new rows, each with the number of its tokens that this step computes.
        """
        queue, prefixes, reads = self.queue, self.memory.prefixes, self.memory.disk_reads
        admitted: list[tuple[int, int]] = []
        at, reserve, has_slot = 0, self.row_blocks.num_next_blocks(computing), True
        while at < min(len(queue.entries), LOOKAHEAD) and self.running.has_free_row and budget.tokens:
            seq = queue.entries[at][2]
            if seq.awaits_token or (reads is not None and not reads.ready(seq.kv)):
                at += 1
                continue
            if seq.adapter is not None and not (has_slot := has_slot and seq.adapter.ready(self.row_blocks.rows)):
                at += 1
                continue
            finds = prefixes.enabled and not seq.kv.held
            self.memory.device.needed_by = seq
            hit = self.pin(seq) if finds else None
            if hit and hit.awaits:
                at += 1
                continue
            alone = not len(self.running.order)
            if not self._fits(seq, hit, budget, alone, reserve):
                if hit:
                    prefixes.unpin(hit)
                if not alone or not seq.kv.shared:
                    break
                queue.take_away(seq)  # no room for copies of its shared blocks
                continue
            row = self._place(at, hit)
            budget.take(count := self.row_blocks.extend(row, budget.most(self.row_blocks.rows.next_chunk(row))))
            admitted.append((row, count))
            reserve += self.row_blocks.num_next_blocks(row)
        return admitted

    def _fits(self, seq: Sequence, hit: Hit | None, budget: StepBudget, alone: bool, reserve: int) -> bool:
        """True if a waiting sequence can start: the blocks it holds and its first chunk fit.

        Args:
          hit: its cached prefix, pinned.
          alone: nothing runs; then part of a chunk is better than waiting for ever, and other waiting sequences give up
            the blocks that they share.
          reserve: blocks that stay free for the running rows.
        """
        size, total = self.memory.block_size, len(seq.token_ids)
        kv, held = seq.kv, seq.kv.held
        done = hit.num_tokens if hit else held.num_computed if held else 0
        left = total - done
        if not budget.most(left):
            return False
        loads = hit.num_loads if hit else len(kv.swapped.ids) if kv.swapped else 0
        # A preempted one starts when all its tokens fit, or it would soon be preempted again.
        count = left if seq.num_preemptions and not alone else budget.most(left)
        allocated = held.allocated_until(size) if held else hit.allocated_until(size) if hit else 0
        layout, states, num_groups = self.layout, self.states, len(self.layout.groups)

        def first_blocks() -> int:
            """Returns the number of blocks that the first token needs."""
            return loads + (num_groups if done >= allocated else 0) + self._num_copies(kv.shared, hit, done < allocated)

        more = (-(-max(done + count - allocated, 0) // size) - (done >= allocated)) * num_groups
        # A fork continues with its parent's blocks: it waits for no reserve.
        room = self.memory.blocks.num_available - (0 if kv.shared else reserve)
        fits = first_blocks() + more <= room or layout.blocks_of(total, self.longest_chunk, seq.num_context) <= room
        if fits and (states is None or states.fits(hit)):
            return True
        if not alone:
            return False
        while first_blocks() > self.memory.blocks.num_available or not (states is None or states.fits(hit)):
            if not self.queue.reclaim_shared(seq):
                return False
        return True

    def pin(self, seq: Sequence) -> Hit:
        """Pins the longest cached prefix of a sequence. After its first eviction, tokens attend to fewer than those in
        blocks of the prefix index did, and only a snapshot has them."""
        prefixes, eviction, most = self.memory.prefixes, self.eviction, seq.max_cached_tokens
        if eviction is not None:
            if eviction.snapshots is not None and (hit := eviction.snapshots.pin(seq, prefixes)):
                return hit
            schedule = eviction.schedule
            most = 0 if schedule.method.marks_blocks else min(most, schedule.first_at(seq.num_context) - 1)
        return prefixes.pin(seq.kv, seq.token_ids, most)

    def _num_copies(self, shared: HeldBlocks | None, hit: Hit | None, inside: bool) -> int:
        """Returns how many of a sequence's blocks must be copied before it writes; inside: to the last ones, too."""
        copying = self.row_blocks.copying
        if hit and hit.snapshot:
            blocks = np.array([(node.at[DEVICE], node.group) for node in hit.nodes])
            return copying.num_forced(blocks[:, 0], blocks[:, 1], inside)
        return 0 if shared is None else copying.num_forced(shared.ids, shared.groups, inside)

    def _place(self, at: int, hit: Hit | None) -> int:
        """Places a waiting sequence in a row with the blocks that it holds; returns the row."""
        rank, seq_id, seq = self.queue.entries.pop(at)
        row, kv = self.running.enter((rank, seq_id)), seq.kv
        if hit:
            held = self.memory.prefixes.claim(kv, hit, seq.token_ids)
        elif kv.swapped:
            assert self.memory.swap is not None
            held = kv.swapped._replace(ids=self.memory.swap.move_in(kv.swapped.ids))
            if self.memory.states is not None:
                held = held._replace(state=self.memory.states.swap_in(held.state))
        elif kv.shared:
            held = kv.shared
        else:
            held = self.memory.begin(kv, len(seq.token_ids))
        forked = kv.shared is not None or (hit is not None and hit.snapshot)
        kv.shared = kv.swapped = None
        kv.has_read, kv.read = False, set()
        if self.memory.disk_reads is not None:
            self.memory.disk_reads.end(kv)
        self.row_blocks.rows.place(seq, row)
        self.row_blocks.fill(row, seq, held, forked)
        if self.eviction is not None and self.eviction.snapshots is not None:
            self.eviction.snapshots.plan(row)
        if self.states is not None:
            self.states.place(row, held.state)
        return row
