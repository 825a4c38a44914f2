"""Tracks the token and sequence position of each slot in a draft model's pool. NumPy."""

from __future__ import annotations

import numpy as np

from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.speculative.base import MAX_DRAFTS


class HeldKeys:
    """Records for each slot the token whose keys and values were last computed there.

    Blocks come and go without the draft model's knowing: they are shared, copied, swapped, taken back after a rejected
    draft and reused. Comparing these records with a row's text finds what its blocks lack. A text with
    another beginning may have the same token at the same place: then drafts are worse guesses, and nothing else.

    Args:
      num_blocks, block_size: of the pool.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self._size = block_size
        # One slot more: padding writes there.
        self._tokens, self._positions = np.full((2, num_blocks * block_size + 1), -1, np.int32)

    def clear(self) -> None:
        """Clears all records."""
        self._positions[:] = -1

    def note(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Records the tokens and sequence positions of slots, all of one shape; positions of -1 hold nothing."""
        self._positions[slots], self._tokens[slots] = positions, tokens

    def first_missing(self, rows: Rows, which: np.ndarray, until: np.ndarray, since: np.ndarray) -> np.ndarray:
        """Returns the first sequence position of each row that is in its blocks and has no keys there; at most `until`.

        Args:
          rows: with one group of blocks. which: [n] rows. until: [n] position at which to end.
          since: [n] positions before it were right, unless they share the block or belong to draft tokens.
        """
        [counts], size = rows.num_blocks[:, which], self._size
        width = int(counts.max())
        # From the end of the tables: blocks for draft tokens, and those that may have changed.
        ahead = int((rows.allocated_until[which] - since).max()) + MAX_DRAFTS + size
        entries = counts[:, None] - 1 - np.arange(min(-(-ahead // size), width))
        at = which[:, None], np.maximum(entries, 0)
        places = np.arange(size)
        positions = rows.block_starts[0][at][..., None] + places
        slots = rows.block_tables[0][at][..., None] * size + places
        there = (entries >= 0)[..., None] & (positions < until[:, None, None])
        texts = rows.token_ids[which[:, None, None], np.where(there, positions, 0)]
        missing = there & ((self._positions[slots] != positions) | (self._tokens[slots] != texts))
        return np.where(missing, positions, until[:, None, None]).min(axis=(1, 2))
