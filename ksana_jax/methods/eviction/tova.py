"""TOVA: token omission via attention (Oren et al., arXiv:2401.06104, section 3.2)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class TOVA(EvictionMethod):
    """Drops the tokens to which the newest query attends least, on average over the heads of a layer.

    No token is exempt, and all heads of a layer keep the same ones. The paper evicts after every token (interval=1).
    """

    observes: ClassVar[bool] = True
    resets_scores: ClassVar[bool] = True

    def query_numbers(self, until_eviction: np.ndarray, num_outputs: np.ndarray) -> np.ndarray:
        return (until_eviction == 1).astype(np.float32)

    def priority(self, cached: Cached, xp: Any) -> Array:
        return xp.broadcast_to(cached.scores.mean(axis=2, keepdims=True), cached.scores.shape)
