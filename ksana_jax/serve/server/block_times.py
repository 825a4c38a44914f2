"""Samples lifetimes, reuse gaps and idle times of cached KV blocks on the device: vLLM's `kv_cache_metrics`.

Knows cached blocks, no requests and no format.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Callable
from itertools import pairwise

from ksana_jax.engine.engine import Engine
from ksana_jax.kv.tier import DEVICE, Node
from ksana_jax.serve.server.histogram import BLOCK_S, Histogram

# Number of last uses of a block that are remembered.
_MOST_USES = 4


@dataclasses.dataclass
class _Block:
    stored_s: float
    uses_s: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_MOST_USES))


class BlockTimes:
    """A `kv.tier.CacheListener` that follows a sample of the blocks from when they are cached until they are replaced.

    Like vLLM's, the histograms count only replaced blocks, neither blocks that stay nor blocks lost with a
    failed step. A block counts from the time at which it is full and cached, in vLLM from its allocation.

    Args:
      sample: probability that a block is followed, above 0 and at most 1.
      clock: monotonic time in seconds.

    Attributes:
      histograms: by the metric's name, without a prefix.
    """

    def __init__(self, sample: float, clock: Callable[[], float] = time.monotonic):
        self._sample, self._clock, self._random = sample, clock, random.Random().random
        self._blocks: dict[Node, _Block] = {}
        names = ("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds")
        self.histograms = {name: Histogram(BLOCK_S) for name in names}

    def attach(self, engine: Engine) -> None:
        """Begins to follow blocks of an engine; call it on the engine's thread."""
        engine.memory.listeners.append(self)

    def stored(self, node: Node, level: int) -> None:
        """See `CacheListener`."""
        if level == DEVICE and self._random() < self._sample:
            self._blocks[node] = _Block(self._clock())

    def used(self, node: Node) -> None:
        """See `CacheListener`."""
        if (block := self._blocks.get(node)) is not None:
            block.uses_s.append(self._clock())

    def dropped(self, node: Node, level: int) -> None:
        """See `CacheListener`."""
        if level != DEVICE or (block := self._blocks.pop(node, None)) is None:
            return
        now, found = self._clock(), self.histograms
        found["kv_block_lifetime_seconds"].observe(now - block.stored_s)
        found["kv_block_idle_before_evict_seconds"].observe(
            now - (block.uses_s[-1] if block.uses_s else block.stored_s)
        )
        for before, after in pairwise(block.uses_s):
            found["kv_block_reuse_gap_seconds"].observe(after - before)

    def cleared(self) -> None:
        """See `CacheListener`."""
        self._blocks.clear()
