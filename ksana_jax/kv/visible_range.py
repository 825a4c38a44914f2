"""The positions that must stay cached, given the attention patterns of some layers. Knows positions; no pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ksana_jax.core.patterns import AttentionPattern


@dataclasses.dataclass(frozen=True)
class VisibleRange:
    """Positions to which at least one layer can still attend, the union of its patterns; decides what may be freed.

    window is None where some layer attends to everything. globals_every holds the distinct strides of global positions.
    """

    window: int | None
    num_sinks: int
    globals_every: tuple[int, ...]

    @classmethod
    def of(cls, patterns: Sequence[AttentionPattern]) -> VisibleRange:
        # Window 8, stride 3: the farthest distance attended to is 6, so 7 positions are enough.
        windows = [(p.window - 1) // p.stride * p.stride + 1 for p in patterns if p.bounded and p.window is not None]
        everything = len(windows) < len(patterns)
        return cls(
            window=None if everything else max(windows),
            num_sinks=max(p.num_sinks for p in patterns),
            globals_every=tuple(sorted({p.global_every for p in patterns if p.global_every is not None})),
        )

    def visible_from(self, next_position):
        """First sequence position that queries at next_position or later attend to, except sinks and global positions;
        shapes are kept. Only where there is a window."""
        # Window 4, next query 10: it attends to 7, 8, 9 and itself.
        return next_position - self.window + 1

    def dead_blocks(self, block_start, block_size: int, next_position):
        """Boolean: no query at next_position or later attends to a block's positions.

        Args:
          block_start: sequence position of each block's first slot; integer array.
          next_position: sequence position of the next query, broadcast against block_start.
        """
        if self.window is None:
            return np.zeros(np.broadcast_shapes(np.shape(block_start), np.shape(next_position)), bool)
        dead = block_start + block_size <= self.visible_from(next_position)
        dead &= block_start >= self.num_sinks
        for every in self.globals_every:
            dead &= (-block_start) % every >= block_size
        return dead

    def num_live_blocks(self, block_size: int, num_tokens: int) -> int:
        """Returns the blocks that a sequence of num_tokens holds for the tokens after them."""
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        if not self.globals_every:
            sinks = min(-(-self.num_sinks // block_size), whole)
            first = self.visible_from(num_tokens) // block_size
            return sinks + whole - min(max(first, sinks), whole)
        starts = np.arange(0, num_tokens, block_size)
        return int(np.count_nonzero(~self.dead_blocks(starts, block_size, num_tokens)))

    def max_live_blocks(self, block_size: int, max_tokens: int, chunk: int = 1) -> int:
        """Returns the maximum number of blocks of one sequence while it computes chunks of up to `chunk` tokens.

        Args:
          max_tokens: length at which the sequence ends.
        """
        whole = -(-max_tokens // block_size)
        if self.window is None:
            return whole
        sinks = -(-self.num_sinks // block_size)
        # A chunk of c queries reaches W - 1 + c positions; n positions touch at most ceil((n - 1) / B) + 1 blocks.
        recent = -(-(self.window - 2 + chunk) // block_size) + 1
        pinned = sum(-(-max_tokens // max(every, block_size)) for every in self.globals_every)
        return min(whole, sinks + recent + pinned)
