"""Hashes of the blocks of a workload's sequences, made once for all runs that serve it. NumPy only.

Routers compare prefixes by them. They are sums modulo 2^64 of tokens times random weights of their
positions: equal sequences have equal sums, others by chance one in 2^64. A server in the real world hashes with
SHA-256, because there prompts may be chosen to collide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ksana_jax.serve.workload.items import WorkItem


class Chains:
    """The hash chains of one workload's prompts and answers.

    Args:
      block_size: tokens of a block.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._chains: dict[int, list[int]] = {}
        self._weights = np.zeros(0, np.uint64)

    def of(self, item: WorkItem) -> list[int]:
        """Returns a hash for each full block of prompt and answer together, of all tokens up to its end."""
        chain = self._chains.get(item.index)
        if chain is None:
            chain = self._chains[item.index] = self._of_text(np.concatenate([item.tokens(), item.output_tokens()]))
        return chain

    def of_prompt(self, item: WorkItem) -> list[int]:
        """Returns a hash for each full block of a prompt."""
        return self.of(item)[: item.num_prompt // self.block_size]

    def _of_text(self, tokens: np.ndarray) -> list[int]:
        if len(tokens) > len(self._weights):
            # Generated from the start: longer arrays begin with the same numbers.
            size = max(len(tokens), 2 * len(self._weights))
            self._weights = np.random.default_rng(0).integers(1, 2**64, size, np.uint64)
        sums = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._weights[: len(tokens)], dtype=np.uint64)
        return sums[self.block_size - 1 :: self.block_size].tolist()
