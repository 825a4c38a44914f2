"""Which blocks of the pool are taken, and by how many owners. Host bookkeeping: counts only; no jax, no tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# ufunc.at is thirty times slower when it has to convert.
_ONE = np.int32(1)


class NoFreeBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockManager:
    """Free blocks as a stack, and a reference count for each block of the pool.

    Args:
      num_blocks: M, blocks in the pool; ids are 0 to M-1.
      block_size: B, tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_count = np.zeros(num_blocks, np.int32)
        # Popped from the end: low ids go first.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> np.ndarray:
        """Takes `count` free blocks, one owner each: ids [count].

        Raises:
          NoFreeBlocks: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        self.num_free -= count
        ids = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.ref_count[ids] = 1
        return ids

    def share(self, ids: np.ndarray) -> None:
        """Adds an owner to each of some taken blocks; an id may occur more than once."""
        assert (self.ref_count[ids] > 0).all(), "a free block cannot be shared"
        np.add.at(self.ref_count, ids, _ONE)

    def release(self, ids: np.ndarray) -> None:
        """Takes one owner from each of some blocks; those left without are free. An id may occur more than once."""
        np.subtract.at(self.ref_count, ids, _ONE)
        left = self.ref_count[ids]
        assert (left >= 0).all(), "a block was released more often than it was taken"
        emptied = np.unique(ids[left == 0])
        self._free[self.num_free : self.num_free + len(emptied)] = emptied[::-1]
        self.num_free += len(emptied)

    def check(self, owned: Iterable[np.ndarray]) -> None:
        """Compares the books with the blocks that owners say they hold.

        Args:
          owned: one array of ids per owner.

        Raises:
          AssertionError: a count is off, or a block is free and held, or in no list at all.
        """
        counts = np.zeros(self.num_blocks, np.int32)
        for ids in owned:
            np.add.at(counts, ids, 1)
        wrong = np.flatnonzero(counts != self.ref_count)
        some = wrong[:8]
        assert not len(wrong), f"blocks {some}: {self.ref_count[some]} owners in the books, {counts[some]} found"
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert not self.ref_count[free].any(), "a block is free and held"
        held = np.count_nonzero(self.ref_count)
        assert held + self.num_free == self.num_blocks, f"{held} held + {self.num_free} free != {self.num_blocks}"
