"""SnapKV: keeps the tokens that a prompt's last queries attend to (Li et al., arXiv:2404.14469, section 4)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod

# Pooling is compiled as so many slices.
MAX_KERNEL = 255


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(EvictionMethod):
    """Keeps the tokens, and their neighbours, to which the last queries of the prompt attend, and these last tokens.

    The window is cut off before weights are pooled, so the attention that it pays to itself counts for no token.
    It evicts once, when a prompt is complete, also with prompts "whole"; all generated tokens are kept. With "streamed"
    it evicts whenever the budget is full, by the previous queries. With layers "pyramid" it is PyramidKV
    (arXiv:2406.02069).

    Args:
      recent: tokens of the observation window, which observe and are kept.
      kernel: tokens over which weights are pooled; odd, at most 255. The authors' code has 5, on LongBench 7.
      pooling: "avg" or "max"; the authors' code has "avg", on LongBench "max".
    """

    recent: float | int = 32
    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"

    observes: ClassVar[bool] = True
    resets_scores: ClassVar[bool] = True
    head_by_head: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        name = f"kv_eviction {type(self).__name__}"
        checks.require(
            checks.integer(f"{name}: recent", self.recent, 1),
            checks.integer(f"{name}: kernel", self.kernel, 1, MAX_KERNEL),
            checks.one_of(f"{name}: pooling", self.pooling, ("avg", "max")),
            None if self.kernel % 2 else f"{name}: kernel is {self.kernel}, must be odd",
            error=ConfigError,
        )

    @property
    def once(self) -> bool:
        return self.prompts != "streamed"

    def query_numbers(self, until_eviction: np.ndarray, num_outputs: np.ndarray) -> np.ndarray:
        return (until_eviction <= self.recent).astype(np.float32)

    def priority(self, cached: Cached, xp: Any) -> Array:
        slots = xp.arange(cached.scores.shape[-1])
        window_start = (cached.num_tokens - cached.num_recent)[:, None, None, None]
        scores = xp.where(slots < window_start, cached.scores, 0)
        side = self.kernel // 2
        padded = xp.pad(scores, ((0, 0), (0, 0), (0, 0), (side, side)))
        shifted = [padded[..., at : at + len(slots)] for at in range(self.kernel)]
        return sum(shifted) / self.kernel if self.pooling == "avg" else xp.stack(shifted).max(axis=0)
