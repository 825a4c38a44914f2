"""A random choice, the control of a study."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod
from ksana_jax.methods.eviction.noise import uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(EvictionMethod):
    """Keeps a random sample of the sequence, a different one in each layer and head, and recent tokens.

    Each token keeps one random number, so that all parts of the sequence are sampled alike.

    Args:
      seed: of the numbers.
    """

    recent: float | int = 0.5
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        checks.require(checks.integer("kv_eviction Random: seed", self.seed, 0), error=ConfigError)

    @property
    def needs_text_positions(self) -> bool:
        return True

    def priority(self, cached: Cached, xp: Any) -> Array:
        _, layers, heads, _ = cached.text_positions.shape
        layer, head = xp.arange(layers)[:, None, None], xp.arange(heads)[:, None]
        group = cached.group[:, None, None, None]
        return uniform(xp, self.seed, group, layer, head, cached.text_positions)
