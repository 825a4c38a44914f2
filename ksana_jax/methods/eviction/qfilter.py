"""Q-Filters: keys along the direction of all queries (Godey et al., arXiv:2503.02812, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.kv.eviction.calibrated import Calibrated


@dataclasses.dataclass(frozen=True, kw_only=True)
class QFilter(Calibrated):
    """Keeps the tokens whose keys have the largest projection on their head's filter.

    A filter is the principal right singular vector of a head's queries, with the sign on which most of them are; a kv
    head has the mean of its query heads'. Queries are nearly one-sided along it, so that the projection estimates the
    mean attention. It observes no attention, and no token is exempt.
    """

    calibrated_for: ClassVar[str] = "qfilter"

    def priority(self, cached: Cached, xp: Any) -> Array:
        return (cached.keys.astype(xp.float32) * cached.constants["filters"][:, :, :, None]).sum(axis=-1)
