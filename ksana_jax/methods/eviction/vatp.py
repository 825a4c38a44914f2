"""VATP: attention received times the size of the value (Guo et al., arXiv:2406.12335, section 4)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.methods.eviction.h2o import H2O


@dataclasses.dataclass(frozen=True, kw_only=True)
class VATP(H2O):
    """Keeps the tokens with the largest product of H2O's sum and the L1 norm of their value, and recent tokens.

    A sink receives much attention and has a small value, so the authors exempt the first 20 tokens.
    """

    sinks: int = 20

    def priority(self, cached: Cached, xp: Any) -> Array:
        return super().priority(cached, xp) * xp.abs(cached.values.astype(xp.float32)).sum(axis=-1)
