"""Disk tiers without files: one whose reads end when a test says so (late, never, or with nothing read), and
one that is slow, fails and loses blocks by a simulation's dice."""

from __future__ import annotations

import random
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.kv.disk.tier import BlockFacts


class Asked(NamedTuple):
    """A read that was asked for; `out` is the slot of the host that it fills."""

    key: bytes
    future: Future[bool]
    out: np.ndarray


class DiskDouble:
    """Replaces `kv.disk.tier.DiskTier` for the rest of the engine, in a dictionary.

    Args:
      answers: True if reads end at once; otherwise they wait for `end`.

    Attributes:
      files: written blocks, by key. asked: reads so far, the last one last.
    """

    enabled = True

    def __init__(self, answers: bool = False):
        self.answers = answers
        self.files: dict[bytes, tuple[BlockFacts, np.ndarray]] = {}
        self.asked: list[Asked] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self.files

    def write(self, facts: BlockFacts, data: np.ndarray) -> None:
        self.files[facts.key] = facts, data.copy()

    def read(self, key: bytes, facts: BlockFacts, out: np.ndarray) -> Future[bool]:
        assert self.files[key][0] == facts, "another block is asked for than was written"
        self.asked.append(Asked(key, Future(), out))
        if self.answers:
            self.end(self.asked[-1])
        return self.asked[-1].future

    def wait(self, reads: Collection[Future[bool]], timeout_s: float) -> None:
        wait(reads, timeout_s, return_when=FIRST_COMPLETED)

    def flush(self) -> None:
        """Does nothing: writes end at once."""

    def reset(self) -> None:
        """Does nothing: no book can be half written."""

    def end(self, asked: Asked, found: Any = True) -> None:
        """Ends a read; a read that finds nothing may have written half of it."""
        data = self.files[asked.key][1]
        asked.out[...] = data if found else ~data
        asked.future.set_result(found)

    def end_all(self, found: bool = True) -> None:
        """Ends all reads that are pending."""
        for asked in self.asked:
            if not asked.future.done():
                self.end(asked, found)


class TroubledDisk(DiskDouble):
    """A disk tier with a clock.

    Attributes:
      delay: ticks that a read takes; 0 reads at once.
      enabled: False after an I/O error: nothing is found from then on.
    """

    def __init__(self):
        super().__init__()
        self.delay, self._now = 0, 0
        self._due: list[tuple[int, Asked, BlockFacts]] = []
        self._corrupt: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return self.enabled and key in self.files

    def write(self, facts: BlockFacts, data: np.ndarray) -> None:
        if self.enabled:
            super().write(facts, data)
            self._corrupt.discard(facts.key)

    def read(self, key: bytes, facts: BlockFacts, out: np.ndarray) -> Future[bool]:
        assert key == facts.key
        asked = Asked(key, Future(), out)
        self._due.append((self._now + self.delay, asked, facts))
        self._end_due()
        return asked.future

    def tick(self) -> None:
        """Lets time pass."""
        self._now += 1
        self._end_due()

    def corrupt(self, rng: random.Random) -> None:
        """Damages some files, which is noticed when they are read."""
        self._corrupt |= {key for key in self.files if rng.random() < 0.3}

    def end_all(self, found: bool = True) -> None:
        self.delay, self._now = 0, self._now + 10**9
        self._end_due()

    def _end_due(self) -> None:
        for due in [d for d in self._due if d[0] <= self._now]:
            self._due.remove(due)
            _, asked, facts = due
            whole = self.enabled and asked.key not in self._corrupt
            if whole and asked.key in self.files and self.files[asked.key][0] == facts:
                self.end(asked)
            else:
                self.files.pop(asked.key, None)
                asked.future.set_result(False)
