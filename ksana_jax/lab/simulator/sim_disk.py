"""A disk tier without files: which blocks it holds, and when its reads and writes end in simulated time. No jax.

It has the calls of `kv.disk.tier.DiskTier`, its order (one worker, first come first served), its replacement and its
limits. Content is not kept, because a simulated block has none.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ksana_jax.kv.disk.block_file import BlockFacts, BlockFormat, file_bytes
from ksana_jax.kv.disk.index import BlockFiles
from ksana_jax.kv.disk.tier import MAX_PENDING_BYTES, DiskCounters
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.move_cost import MoveCost, TransferLink


class SimRead(NamedTuple):
    """A read under way, with the methods of a future that are called. found: whether the block exists."""

    clock: VirtualClock
    ends_s: float
    found: bool

    def done(self) -> bool:
        return self.clock() >= self.ends_s

    def result(self) -> bool:
        return self.found


class SimDisk:
    """Blocks of one format on a simulated disk.

    Args:
      format: of every block. budget_bytes: maximum bytes of files. clock: of the engine.
      move: how long a read and a write of a block take.

    Attributes:
      busy_s: seconds of all reads and writes, future ones included. waited_s: seconds when the engine waited for none.
    """

    def __init__(self, format: BlockFormat, budget_bytes: int, clock: VirtualClock, move: MoveCost):
        self.format, self.budget_bytes, self.counters = format, budget_bytes, DiskCounters()
        self.enabled, self.busy_s, self.waited_s = True, 0.0, 0.0
        self._asked_at = math.nan
        self._clock, self._move, self._files = clock, move, BlockFiles()
        self._free_at, self._pending = 0.0, collections.deque[float]()  # ends of writes

    @property
    def num_bytes(self) -> int:
        """Total size of the files in bytes."""
        return self._files.num_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._files.by_key

    def keys(self) -> list[bytes]:
        """Keys of all blocks."""
        return list(self._files.by_key)

    def facts(self, key: bytes) -> BlockFacts | None:
        """Returns a block's content; None if it does not exist."""
        file = self._files.by_key.get(key)
        return file and file.facts

    def write(self, facts: BlockFacts, data: np.ndarray) -> None:
        """Stores a block, unless it is stored already, there is no room or too many writes wait."""
        if facts.key in self._files.by_key:
            return
        while self._pending and self._pending[0] <= self._clock():
            self._pending.popleft()
        if self._pending and (len(self._pending) + 1) * self.format.nbytes > MAX_PENDING_BYTES:
            self.counters.dropped += 1
            return
        file, size = self._files.add(facts.key, facts), file_bytes(self.format, facts)
        if not self._make_room(size):
            self._files.remove(file)
            self.counters.dropped += 1
            return
        self._files.store(file, size)
        self._pending.append(self._work(self._move.written))
        self.counters.written += 1
        self.counters.written_bytes += self.format.nbytes

    def read(self, key: bytes, expected: BlockFacts, out: np.ndarray) -> SimRead:
        """Starts to read a block."""
        file = self._files.by_key.get(key)
        if file is None:
            self.counters.misses += 1
            return SimRead(self._clock, self._clock(), False)
        self._files.use(file)
        found = file.facts == expected
        self.counters.misses += not found
        self.counters.read += found
        self.counters.read_bytes += found * self.format.nbytes
        return SimRead(self._clock, self._work(self._move.read), found)

    def wait(self, reads: Sequence[SimRead], timeout_s: float) -> None:
        """Lets time pass until one of the reads is done, at most timeout_s.

        If all are done and the engine asks again at the same time, no request can use them yet: only the deadline of
        another request that waits for them (`kv.disk_reads.DiskReads.begin`) unblocks it, so the time passes.
        """
        now, ends = self._clock(), [read.ends_s for read in reads if not read.done()]
        if ends:
            self._clock.advance_to(min(now + timeout_s, *ends))
        elif self._asked_at == now:
            self._clock.advance(timeout_s)
            self.waited_s += timeout_s
        else:
            self._asked_at = now

    def flush(self) -> None:
        """Lets time pass until all reads and writes are done."""
        self._clock.advance_to(self._free_at)

    def reset(self) -> None:
        """Does nothing: files outlive a failure of the engine."""

    def close(self) -> None:
        self.flush()

    def _work(self, link: TransferLink) -> float:
        """Gives the worker a block to move; returns when it has done so."""
        seconds = link.seconds(self.format.nbytes)
        self._free_at = max(self._free_at, self._clock()) + seconds
        self.busy_s += seconds
        return self._free_at

    def _make_room(self, size: int) -> bool:
        files = self._files
        while files.num_bytes + size > self.budget_bytes:
            if size > self.budget_bytes or (file := files.victim()) is None:
                return False
            files.remove(file)
            self.counters.replaced += 1
        return True
