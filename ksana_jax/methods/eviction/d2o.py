"""D2O: H2O whose evicted tokens are merged into similar ones (Wan et al., arXiv:2406.13035, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached, Merged
from ksana_jax.methods.eviction.h2o import H2O
from ksana_jax.methods.eviction.keydiff import normalised


@dataclasses.dataclass(frozen=True, kw_only=True)
class D2O(H2O):
    """Keeps the tokens that H2O keeps, and merges each other one into the one with the most similar key.

    A token whose cosine similarity is below a threshold is dropped: the mean similarity of the tokens that go, averaged
    over evictions. Weights are exp(similarity), e of the token that stays. Each KV head has its own threshold. Budgets
    do not depend on the layer's attention as the authors' do.

    Args:
      smoothing: weight of the newest eviction in the threshold.
    """

    sinks: int = 4
    recent: float | int = 0.25
    smoothing: float = 0.7

    merges: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        checks.require(checks.number("kv_eviction D2O: smoothing", self.smoothing, 0, 1), error=ConfigError)

    def state_shape(self, num_queries: int, head_dim: int) -> tuple[int, ...]:
        return (1,)  # the threshold; 0 before the first eviction

    def observe(self, q: Array, text_positions: Array, xp: Any) -> Array:
        return xp.zeros((*q.shape[:2], 1), xp.float32)

    def merge(self, cached: Cached, stays: Array, xp: Any) -> Merged:
        into, cosines = most_similar(cached, stays, xp)
        goes = (xp.arange(stays.shape[-1]) < cached.num_tokens[:, None, None, None]) & ~stays
        mean = xp.where(goes, cosines, 0).sum(axis=-1) / xp.maximum(goes.sum(axis=-1), 1)
        last = cached.state[..., 0]
        threshold = xp.where(last == 0, mean, self.smoothing * mean + (1 - self.smoothing) * last)
        is_similar = cosines >= threshold[..., None]
        weights = xp.exp(xp.where(stays, 1, cosines)) * (stays | (goes & is_similar))
        return Merged(into, weights, threshold[..., None])


def most_similar(cached: Cached, stays: Array, xp: Any) -> tuple[Array, Array]:
    """Returns for each token the slot of the one among those that stay whose key has the largest cosine to its own, and
    this cosine: [n, Lg, K, C] each."""
    keys, into, best = normalised(cached, xp), [], [xp.zeros(1, xp.float32)]
    rows = max(128, -(-stays.shape[-1] // 64))  # all pairs at once would need gigabytes, see `RKV`
    for start in range(0, stays.shape[-1], rows):
        own = keys[..., start : start + rows, :] + 0 * best[-1][..., :1, None]
        cosines = xp.where(stays[..., None, :], own @ xp.swapaxes(keys, -1, -2), -2)
        into.append(cosines.argmax(axis=-1).astype(xp.int32))
        best.append(cosines.max(axis=-1))
    return xp.concatenate(into, axis=-1), xp.concatenate(best[1:], axis=-1)
