"""ChunkKV: chunks of neighbours that a prompt's last queries attend to (Liu et al., arXiv:2502.00299, section 3.2)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.methods.eviction.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKV(SnapKV):
    """Keeps the chunks to which the last queries of the prompt attend most on average, and these last tokens.

    It observes, and evicts, as SnapKV does. Chunks are cut from the first cached token up to the window; all
    heads of a layer keep the same ones. The budget holds: if a chunk fits in part, its first tokens stay. Each
    layer chooses for itself, while the authors can reuse the choice of the layer below.

    Args:
      chunk_size: tokens of a chunk.
      kernel: tokens over which weights are pooled before they are averaged over chunks; odd.
    """

    kernel: int = 1
    chunk_size: int = 10

    head_by_head: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        checks.require(checks.integer("kv_eviction ChunkKV: chunk_size", self.chunk_size, 1), error=ConfigError)

    def priority(self, cached: Cached, xp: Any) -> Array:
        *_, num_slots = cached.scores.shape
        size = min(self.chunk_size, num_slots)
        window_start = (cached.num_tokens - cached.num_recent)[:, None, None, None]
        counts = xp.arange(num_slots) < window_start
        scores = xp.where(counts, super().priority(cached, xp).mean(axis=2, keepdims=True), 0)
        means = _sums(scores, size, xp) / xp.maximum(_sums(counts, size, xp), 1)
        return xp.broadcast_to(xp.repeat(means, size, axis=-1)[..., :num_slots], cached.scores.shape)


def _sums(x: Array, size: int, xp: Any) -> Array:
    """Returns the sums of [n, Lg, 1, C] over chunks of a size, [n, Lg, 1, chunks]."""
    x = xp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[-1] % size)))
    return x.reshape(*x.shape[:3], -1, size).sum(axis=-1)
