"""Expected attention: of future queries with a known distribution (Devoto et al., arXiv:2510.00636, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod
from ksana_jax.kv.eviction.calibrated import Calibrated, require_rotated

# The rotation takes 8 bytes for each position, layer and pair of channels.
MAX_FUTURE = 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Expected(EvictionMethod):
    """Keeps the tokens with the largest expected attention times the norm of their values.

    Queries of a head are taken as normal, and the rotation is averaged over the next positions: a key's expected weight
    is exp(mean k + k covariance k / 2). Weights are normalised over the cached tokens after the sinks, and averaged
    over the query heads of a kv head.

    Args:
      future: positions over which the rotation is averaged; at most 16,384.
      covariance: False leaves the covariance out.
      value_norms: False leaves the norms of values out.
      epsilon: added to the weight before it is multiplied by the norm.
    """

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norms: bool = True
    epsilon: float = 0.0

    reads_ropes: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        require_rotated(self)
        name = f"kv_eviction {type(self).__name__}"
        checks.require(
            checks.integer(f"{name}: future", self.future, 1, MAX_FUTURE),
            checks.boolean(f"{name}: covariance", self.covariance),
            checks.boolean(f"{name}: value_norms", self.value_norms),
            checks.number(f"{name}: epsilon", self.epsilon, 0),
            error=ConfigError,
        )

    @property
    def compiled(self) -> EvictionMethod:
        # Weights are normalised without the sinks.
        return dataclasses.replace(super().compiled, sinks=self.sinks)

    def priority(self, cached: Cached, xp: Any) -> Array:
        keys, heads = cached.keys.astype(xp.float32), cached.keys.shape[2]
        mean, covariance = self.statistics_of(cached, xp)
        turn = _MeanRotation(cached, self.future, xp)
        mean = turn(mean)
        if covariance is not None:  # it is symmetric, and turned on both sides
            covariance = turn(xp.swapaxes(turn(covariance), -1, -2))
        slots, group = xp.arange(keys.shape[3]), mean.shape[2] // heads
        seen = (slots >= self.sinks) & (slots < cached.num_tokens[:, None, None, None])
        total = xp.zeros(keys.shape[:-1], xp.float32)
        for head in range(group):  # one at a time takes less memory
            logits = (keys * mean[:, :, head::group, None]).sum(axis=-1)
            if covariance is not None:
                logits = logits + ((keys @ covariance[:, :, head::group]) * keys).sum(axis=-1) / 2
            logits = xp.where(seen, logits, -xp.inf)
            top = logits.max(axis=-1, keepdims=True)
            weights = xp.exp(logits - xp.where(xp.isfinite(top), top, 0))
            sums = weights.sum(axis=-1, keepdims=True)
            total = total + weights / xp.where(sums > 0, sums, 1) / group
        if not self.value_norms:
            return total
        values = cached.values.astype(xp.float32)
        return (total + self.epsilon) * xp.sqrt((values * values).sum(axis=-1))

    def statistics_of(self, cached: Cached, xp: Any) -> tuple[Array, Array | None]:
        """Returns mean [n, Lg, N, H] and, if it is needed, covariance [n, Lg, N, H, H] of queries, scaled, before their
        rotation."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(_Expected):
    """Expected attention of queries with the mean and the covariance of the sequence's so far, without the sinks'.

    Each block holds sums of the outer products of its tokens' queries, which take several times the memory of its keys
    and values.
    """

    def state_shape(self, num_queries: int, head_dim: int) -> tuple[int, ...]:
        return num_queries, head_dim + 1 if self.covariance else 1, head_dim

    @property
    def stored(self) -> str:
        return f"{super().stored}, {self.state_shape(1, 2)} of queries after {self.sinks}"

    def observe(self, q: Array, text_positions: Array, xp: Any) -> Array:
        q = xp.where((text_positions >= self.sinks)[:, None, None, None], q, 0)[..., None, :]
        return xp.concatenate([q, xp.swapaxes(q, -1, -2) * q], axis=-2) if self.covariance else q

    def statistics_of(self, cached: Cached, xp: Any) -> tuple[Array, Array | None]:
        n, layers, *_, rows, size = cached.state.shape
        state = cached.state.reshape(n, layers, -1, rows, size)
        count = xp.maximum(cached.length - self.sinks, 1).astype(xp.float32)[:, None, None, None]
        mean = state[..., 0, :] / count
        if not self.covariance:
            return mean, None
        return mean, state[..., 1:, :] / count[..., None] - mean[..., None] * mean[..., None, :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttentionStats(_Expected, Calibrated):
    """Expected attention of queries whose mean and covariance were measured on another text, in `statistics`."""

    calibrated_for: ClassVar[str] = "expected_attention"

    def statistics_of(self, cached: Cached, xp: Any) -> tuple[Array, Array | None]:
        return cached.constants["mean"], cached.constants["covariance"] if self.covariance else None


class _MeanRotation:
    """The rotation of each layer, averaged over the positions after the sequence; scaled as keys and queries are."""

    def __init__(self, cached: Cached, future: int, xp: Any):
        frequencies, scale = cached.constants["inv_freq"], cached.constants["rope_scale"]  # [n, Lg, H/2]
        angles = (cached.length[:, None, None, None] + xp.arange(future)[:, None]) * frequencies[:, :, None]
        self._xp = xp
        self._cos, self._sin = (f(angles).mean(axis=2) * scale for f in (xp.cos, xp.sin))

    def __call__(self, x: Array) -> Array:
        """Rotates the last axis of x [n, Lg, N, ..., H]."""
        half = x.shape[-1] // 2
        shape = (*self._cos.shape[:2], *(1,) * (x.ndim - 3), half)
        cos, sin, a, b = self._cos.reshape(shape), self._sin.reshape(shape), x[..., :half], x[..., half:]
        return self._xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
