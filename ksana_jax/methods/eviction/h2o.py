"""H2O: heavy hitters and recent tokens (Zhang et al., arXiv:2306.14048, section 4)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(EvictionMethod):
    """Keeps the tokens that have received the most attention, and the newest half of the budget.

    The weights of all queries so far are summed, also of a prompt's; later queries are unknown. Query
    heads that share a kv head are summed.

    Args:
      normalised: divide a token's sum by the number of queries that could see it, as kvpress' ObservedAttentionPress
        does; otherwise early tokens, which more queries have seen, are favoured, as in the paper.
    """

    recent: float | int = 0.5
    normalised: bool = False

    observes: ClassVar[bool] = True
    head_by_head: ClassVar[bool] = True

    @property
    def needs_text_positions(self) -> bool:
        return self.normalised

    def priority(self, cached: Cached, xp: Any) -> Array:
        if not self.normalised:
            return cached.scores
        return cached.scores / (cached.length[:, None, None, None] - cached.text_positions)
