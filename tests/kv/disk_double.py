"""A disk tier whose reads come to an end when a test says so: late, never, or with nothing read."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.kv.disk_tier import BlockFacts


class Asked(NamedTuple):
    """A read that was asked for; `out` is the slot of the host that it fills."""

    key: bytes
    future: Future[bool]
    out: np.ndarray


class DiskDouble:
    """What `kv.disk_tier.DiskTier` is for the rest of the engine, in a dictionary.

    Args:
      answers: whether reads end at once; otherwise they wait for `end`.

    Attributes:
      files: what was written, by key. asked: reads so far, the last one last.
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

    def end(self, asked: Asked, found: Any = True) -> None:
        """Ends a read; one that finds nothing may have written half of it."""
        data = self.files[asked.key][1]
        asked.out[...] = data if found else ~data
        asked.future.set_result(found)

    def end_all(self, found: bool = True) -> None:
        """Ends all reads that are pending."""
        for asked in self.asked:
            if not asked.future.done():
                self.end(asked, found)
