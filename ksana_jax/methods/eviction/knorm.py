"""Keys of small norm (Devoto et al., arXiv:2406.11430, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class KNorm(EvictionMethod):
    """Keeps the tokens whose keys have the smallest L2 norm, which tend to receive the most attention.

    It observes no attention, so it costs nothing between evictions. As in the authors' code, no token is exempt; unlike
    there, the first two layers are evicted from, too.
    """

    head_by_head: ClassVar[bool] = True

    def priority(self, cached: Cached, xp: Any) -> Array:
        keys = cached.keys.astype(xp.float32)
        return -xp.sqrt((keys * keys).sum(axis=-1))
