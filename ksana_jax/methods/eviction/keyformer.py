"""Keyformer: key tokens by attention with Gumbel noise (Adnan et al., arXiv:2403.09054, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod, Observation
from ksana_jax.methods.eviction.noise import uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keyformer(EvictionMethod):
    """Sums softmax((logits + Gumbel noise) / temperature) instead of the attention weights, and keeps recent tokens.

    Noise and a rising temperature make up for the evicted tokens. Each pair of query and key has separate noise
    from the seed.

    Args:
      first_temperature, last_temperature: in a prompt, and `steps` generated tokens later; linear in between.
      seed: of the noise.
    """

    recent: float | int = 0.3
    first_temperature: float = 1.0
    last_temperature: float = 2.0
    steps: int = 100
    seed: int = 0

    observes: ClassVar[bool] = True
    custom_logits: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.number("kv_eviction Keyformer: first_temperature", self.first_temperature, above=0),
            checks.number("kv_eviction Keyformer: last_temperature", self.last_temperature, above=0),
            checks.integer("kv_eviction Keyformer: steps", self.steps, 1),
            checks.integer("kv_eviction Keyformer: seed", self.seed, 0),
            error=ConfigError,
        )

    def query_numbers(self, until_eviction: np.ndarray, num_outputs: np.ndarray) -> np.ndarray:
        done = np.clip(num_outputs / self.steps, 0, 1)
        return (self.first_temperature + done * (self.last_temperature - self.first_temperature)).astype(np.float32)

    def query_factor(self, numbers: Array) -> Array:
        return 1.0

    def observed_logits(self, logits: Array, seen: Observation, xp: Any) -> Array:
        noise = -xp.log(-xp.log(uniform(xp, self.seed, seen.layer, seen.head, seen.query, seen.slot)))
        return (logits + noise) / seen.number

    def priority(self, cached: Cached, xp: Any) -> Array:
        return cached.scores
