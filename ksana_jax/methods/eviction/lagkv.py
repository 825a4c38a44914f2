"""LagKV: tokens that stand out on the scale of those that follow (Liang et al., arXiv:2504.04704, section 2)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagKV(EvictionMethod):
    """Keeps the tokens whose keys and values vary most between channels, measured by the tokens that follow.

    After the sinks, cached tokens form partitions of `lag_size`. The range of a channel in the next partition is its
    unit; the standard deviation over channels is a token's score, as softmax in its partition, of keys plus values.
    All partitions lose equally many tokens. The last whole one and the rest have nothing to be measured by: they go
    last, the oldest first. The authors evict from each partition once, so their cache grows; here it is cut into
    partitions at each eviction, and holds the budget.

    Args:
      lag_size: tokens of a partition.
    """

    sinks: int = 16
    lag_size: int = 128

    head_by_head: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        checks.require(checks.integer("kv_eviction LagKV: lag_size", self.lag_size, 1), error=ConfigError)

    @property
    def compiled(self) -> EvictionMethod:
        # Partitions begin after the sinks.
        return dataclasses.replace(super().compiled, sinks=self.sinks)

    def priority(self, cached: Cached, xp: Any) -> Array:
        num_slots = cached.keys.shape[3]
        # Numbers beyond the cache rank its tokens as these do.
        sinks, lag = min(self.sinks, num_slots), min(self.lag_size, num_slots)
        scores = _scores(cached.keys, sinks, lag, xp) + _scores(cached.values, sinks, lag, xp)
        ranks = xp.argsort(xp.argsort(scores, axis=-1, stable=True), axis=-1, stable=True)
        ranks = ranks.reshape(*ranks.shape[:3], -1)
        ranks = xp.pad(ranks, ((0, 0), (0, 0), (0, 0), (sinks, 0)))[..., :num_slots]
        num_scored = xp.maximum((cached.num_tokens - sinks) // lag - 1, 0) * lag
        slots = xp.arange(num_slots)
        return xp.where(slots < sinks + num_scored[:, None, None, None], ranks, lag + slots)


def _scores(x: Array, sinks: int, lag: int, xp: Any) -> Array:
    """Returns [n, Lg, K, partitions, lag] of keys or values; the last partition's mean nothing."""
    n, layers, heads, num_slots, size = x.shape
    num = max(-(-(num_slots - sinks) // lag), 1)
    missing = max(sinks + num * lag - num_slots, 0)
    x = xp.pad(x.astype(xp.float32), ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))[:, :, :, sinks:]
    x = x.reshape(n, layers, heads, num, lag, size)
    following = xp.roll(x, -1, axis=3)
    least, most = following.min(axis=4, keepdims=True), following.max(axis=4, keepdims=True)
    # The range of a channel that is constant but for rounding would be noise.
    varies = most - least > 1e-5 * xp.maximum(xp.abs(least), xp.abs(most))
    spread = ((x - least) / xp.where(varies, most - least, 1)).std(axis=-1, ddof=1)
    weights = xp.exp(spread - spread.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
