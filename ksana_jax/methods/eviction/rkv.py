"""R-KV: tokens that matter and are not redundant (Cai et al., arXiv:2505.24133, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.methods.eviction.keydiff import normalised
from ksana_jax.methods.eviction.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class RKV(SnapKV):
    """Keeps the tokens to which the last queries attend and whose keys are unlike others, and these last tokens.

    Importance is SnapKV's, of weights that sum to 1 before the observation window. Redundancy is the softmax of a key's
    mean cosine similarity to the cached keys, where each key leaves out the newest one that it is similar to: of
    repetitions the newest stays. Query heads that share a kv head are averaged; the authors' code takes the maximum of
    their logits. It continues to evict in the answer; the authors do so after each 128 tokens (interval=128).

    Args:
      mix_lambda: the factor of importance; redundancy has the rest.
      threshold: keys with a larger cosine are similar.
    """

    recent: float | int = 8
    kernel: int = 7
    pooling: Literal["avg", "max"] = "max"
    mix_lambda: float = 0.1
    threshold: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.number("kv_eviction RKV: mix_lambda", self.mix_lambda, 0, 1),
            checks.number("kv_eviction RKV: threshold", self.threshold, 0, 1),
            error=ConfigError,
        )

    @property
    def once(self) -> bool:
        return self.prompts == "once"

    def priority(self, cached: Cached, xp: Any) -> Array:
        slots = xp.arange(cached.scores.shape[-1])
        num_tokens, num_recent = (x[:, None, None, None] for x in (cached.num_tokens, cached.num_recent))
        weights = xp.where(slots < num_tokens - num_recent, cached.scores, 0).sum(axis=-1, keepdims=True)
        importance = super().priority(cached, xp) / xp.where(weights > 0, weights, 1)
        similarity = xp.where(slots < num_tokens, self._similarity(cached, xp) / num_tokens, -xp.inf)
        redundancy = xp.exp(similarity - similarity.max(axis=-1, keepdims=True))
        redundancy = redundancy / redundancy.sum(axis=-1, keepdims=True)
        return self.mix_lambda * importance - (1 - self.mix_lambda) * redundancy

    def _similarity(self, cached: Cached, xp: Any) -> Array:
        """Returns each key's sum of cosines to the other keys, [n, Lg, K, C], without those that leave it out."""
        keys = normalised(cached, xp)
        num_slots = keys.shape[-2]
        slots, total = xp.arange(num_slots), xp.zeros(keys.shape[:-1], xp.float32)
        # All pairs at once would need gigabytes. Adding a zero of the sum so far makes XLA finish some before the next.
        rows = max(128, -(-num_slots // 64))
        for start in range(0, num_slots, rows):
            own = slots[start : start + rows, None]
            cosines = (keys[..., start : start + rows, :] + 0 * total[..., :1, None]) @ xp.swapaxes(keys, -1, -2)
            cosines = xp.where(own == slots, 0, cosines)
            newest = xp.where(cosines > self.threshold, slots, -1).max(axis=-1, keepdims=True)
            total = total + xp.where(slots == newest, 0, cosines).sum(axis=-2)
        return total
