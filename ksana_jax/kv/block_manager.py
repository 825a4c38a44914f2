"""Reference counts of a pool's blocks: which are free, owned, or kept without an owner. Counts only; no jax."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# ufunc.at is thirty times slower if it has to convert.
_ONE = np.int32(1)
_NONE = np.zeros(0, np.int32)


class NoFreeBlocks(RuntimeError):
    """More blocks were requested than are available."""


class BlockManager:
    """Manages free blocks as a stack, and a reference count for each block of the pool.

    A block is free, held (reference count above 0), or idle: kept for its content although it has no owner.

    Args:
      num_blocks: M, blocks in the pool; ids are 0 to M-1. block_size: B, tokens in a block.

    Attributes:
      kept: [M] bool, blocks that become idle instead of free when their last owner leaves.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.kept = np.zeros(num_blocks, bool)
        # Popped from the end, so low ids are taken first.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks
        self.num_idle = 0

    @property
    def num_used(self) -> int:
        """Number of blocks with at least one owner."""
        return self.num_blocks - self.num_free - self.num_idle

    @property
    def num_available(self) -> int:
        """Number of blocks that are free or can be freed."""
        return self.num_free + self.num_idle

    def allocate(self, count: int) -> np.ndarray:
        """Takes `count` free blocks, one owner each: ids [count].

        Raises:
          NoFreeBlocks: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks requested, {self.num_free} of {self.num_blocks} free")
        self.num_free -= count
        ids = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.ref_count[ids] = 1
        return ids

    def share(self, ids: np.ndarray) -> None:
        """Adds an owner to each of some held or idle blocks; an id may occur more than once."""
        if not len(ids):
            return
        ownerless = ids[self.ref_count[ids] == 0]
        if len(ownerless):
            assert self.kept[ownerless].all(), "a free block cannot be shared"
            self.num_idle -= len(np.unique(ownerless))
        np.add.at(self.ref_count, ids, _ONE)

    def release(self, ids: np.ndarray) -> np.ndarray:
        """Removes one owner from each of some blocks; an id may occur more than once.

        Blocks without an owner become idle if they are kept, free otherwise.

        Returns:
          The blocks that have become idle.
        """
        if np.count_nonzero(self.ref_count[ids] != 1) or len(set(ids.tolist())) < len(ids):
            np.subtract.at(self.ref_count, ids, _ONE)
            left = self.ref_count[ids]
            assert (left >= 0).all(), "a block was released more often than it was taken"
            emptied = np.unique(ids[left == 0])
        else:  # nothing is shared, in a third of the time
            self.ref_count[ids] = 0
            emptied = np.sort(ids)
        idle = _NONE
        kept = self.kept[emptied]
        if np.count_nonzero(kept):
            idle, emptied = emptied[kept], emptied[~kept]
            self.num_idle += len(idle)
        self._free[self.num_free : self.num_free + len(emptied)] = emptied[::-1]
        self.num_free += len(emptied)
        return idle

    def keep(self, block: int) -> None:
        """Marks a held block to become idle, not free, when its last owner leaves."""
        assert self.ref_count[block] > 0, "only a held block can be kept"
        self.kept[block] = True

    def forget(self, block: int) -> None:
        """Unmarks a kept block; an idle one becomes free."""
        assert self.kept[block], "the block was not kept"
        self.kept[block] = False
        if not self.ref_count[block]:
            self.num_idle -= 1
            self._free[self.num_free] = block
            self.num_free += 1

    def check(self, owned: Iterable[np.ndarray]) -> None:
        """Checks the reference counts against the blocks that owners hold.

        Args:
          owned: one array of ids per owner.

        Raises:
          AssertionError: a count is wrong, or a block is both free and held, or in no list at all.
        """
        counts = np.bincount(np.concatenate([_NONE, *owned]), minlength=self.num_blocks)
        wrong = np.flatnonzero(counts != self.ref_count)
        some = wrong[:8]
        assert not len(wrong), f"blocks {some}: {self.ref_count[some]} owners counted, {counts[some]} found"
        idle = self.kept & (counts == 0)
        lists = np.bincount(self._free[: self.num_free], minlength=self.num_blocks) + (counts > 0) + idle
        odd = np.flatnonzero(lists != 1)[:8]
        assert not len(odd), f"blocks {odd} are {lists[odd]} times among those that are free, held or idle"
        num_idle = np.count_nonzero(idle)
        assert num_idle == self.num_idle, f"{self.num_idle} idle blocks counted, {num_idle} found"
