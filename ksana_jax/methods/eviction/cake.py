"""CAKE: layers whose attention is spread and shifts keep more tokens (Qin et al., arXiv:2503.12491, section 4)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.methods.eviction.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class CAKE(SnapKV):
    """Divides the budget among layers by the entropy and the variance of their attention, and keeps the tokens that a
    prompt's last queries attend to, more so if their weights vary. It evicts once, when a prompt is complete.

    A layer's part of what exceeds the windows is proportional to entropy**(1 / tau1) * variance**(1 / tau2).

    Args:
      tau1, tau2: temperatures. The authors chose both for each model and budget, from 0.4 to 2.3.
      gamma: weight of a token's variance next to its mean weight; the authors' LongBench runs have 200.
    """

    tau1: float = 1.0
    tau2: float = 1.0
    gamma: float = 200.0

    measures: ClassVar[bool] = True
    head_by_head: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            *(checks.number(f"kv_eviction CAKE: {name}", getattr(self, name), above=0) for name in ("tau1", "tau2")),
            checks.number("kv_eviction CAKE: gamma", self.gamma, 0),
            error=ConfigError,
        )

    def num_scores(self, num_queries: int) -> int:
        return num_queries + 2

    def observed(self, weights: Array, xp: Any) -> Array:
        entropy = -(weights * xp.log(weights + 1e-10)).sum(axis=(2, 3))
        of_heads = xp.moveaxis(weights.sum(axis=3), 2, 0)
        return xp.concatenate([of_heads, (weights**2).sum(axis=(2, 3))[None], entropy[None]])

    def _moments(self, cached: Cached, xp: Any) -> tuple[Array, Array]:
        """Returns the mean and the variance of weights over the window's queries, summed over query heads."""
        of_heads, squares = cached.scores[..., :-2], cached.scores[..., -2]
        count = xp.maximum(cached.num_recent, 2)[:, None, None, None]
        variance = (squares - (of_heads**2).sum(axis=-1) / count) / (count - 1)
        return of_heads.sum(axis=-1) / count, xp.maximum(variance, 0)

    def measure(self, cached: Cached, xp: Any) -> Array:
        before = xp.arange(cached.keys.shape[3]) < (cached.num_tokens - cached.num_recent)[:, None, None, None]
        found = cached.scores[..., -1], self._moments(cached, xp)[1]
        return xp.stack([xp.where(before, x, 0).sum(axis=-1) for x in found], axis=-1)

    def budgets(self, measured: np.ndarray, num_kept: int, num_prompt: int) -> np.ndarray:
        entropy, variance = measured.sum(axis=1, dtype=np.float64).T
        preference = entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
        window = min(self.recent, num_kept)
        if not (total := preference.sum()):
            return np.full(len(preference), num_kept)
        found, most = preference / total * len(preference) * (num_kept - window), num_prompt - window
        over, fits = np.maximum(found - most, 0).sum(), found < most
        return window + np.minimum(found, most) + fits * over / max(fits.sum(), 1)

    def priority(self, cached: Cached, xp: Any) -> Array:
        mean, variance = self._moments(cached, xp)
        scores = (mean + self.gamma * variance) / (cached.scores.shape[-1] - 2)
        return super().priority(cached._replace(scores=scores), xp)
