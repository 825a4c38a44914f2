"""The queue of waiting sequences, in order of service or waiting for a leader's prompt. Does not know which run."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import Owner
from ksana_jax.kv.tier import DEVICE, HOST
from ksana_jax.scheduler.policies import SchedulingPolicy
from ksana_jax.sequence import Sequence


class WaitingQueue:
    """Holds the waiting sequences of a scheduler.

    Attributes:
      entries: (rank, seq_id, sequence), sorted; preempted ones return to their place.
      leaders: sequences whose forks wait until they have computed their prompt; those are in no order yet.
    """

    def __init__(self, memory: KVMemory, policy: SchedulingPolicy):
        self._memory, self._policy = memory, policy
        self._reorder: Callable[[list[Sequence], KVMemory], None] | None = getattr(policy, "reorder", None)
        self.entries: list[tuple[Any, int, Sequence]] = []
        self.leaders: dict[Sequence, None] = {}

    def rank(self, seq: Sequence) -> None:
        """Asks the policy for a sequence's rank, once."""
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
        """Takes a sequence out of the queue and releases what it holds."""
        self.entries = [entry for entry in self.entries if entry[2] is not seq]
        self._memory.disk_reads.end(seq.kv)
        self.take_away(seq)

    def take_away(self, seq: Sequence) -> None:
        """Releases the blocks that a waiting sequence holds; it recomputes them if it runs."""
        kv = seq.kv
        if kv.shared is not None:
            self._memory.device.release(kv.shared.ids)
        if kv.swapped is not None:
            self._memory.swap.discard(kv.swapped.ids)
        kv.shared = kv.swapped = None
        kv.num_indexed = 0
        kv.nodes.clear()

    def reclaim_shared(self, spared: Sequence | None = None) -> bool:
        """Releases the shared blocks of the last waiting sequence that holds some; False if there is none."""
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

    def owners(self) -> Iterator[Owner]:
        """Yields waiting sequences as owners of the blocks and slots that they hold."""
        for _, _, seq in self.entries:
            for tier, held in ((DEVICE, seq.kv.shared), (HOST, seq.kv.swapped)):
                if held is not None:
                    yield Owner(
                        seq.request_id, seq.index, "waits", tier, held.ids, held.starts, held.num_cached, held.origins
                    )
            if len(slots := self._memory.disk_reads.reserved(seq.kv)):
                yield Owner(seq.request_id, seq.index, "reads", HOST, slots)
