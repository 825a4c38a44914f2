"""The future as a control: what the rest of the text will attend to."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(EvictionMethod):
    """Keeps the tokens that receive the most attention in the whole text, from later queries too, and recent tokens.

    No method can know that while a text is generated, so it only scores texts: each is computed with the full cache
    first, which adds up the attention weights that each layer and kv head gives to each token. Query heads that share a
    kv head are added up.

    Args:
      scores: sums of one text, see `EvictionMethod.given`; `experiments.oracle` measures them.
    """

    scores: Any = dataclasses.field(default=None, compare=False, repr=False)

    observes: ClassVar[bool] = True
    foresees: ClassVar[bool] = True

    @property
    def needs_text_positions(self) -> bool:
        return True

    @property
    def given(self) -> Array:
        return self.scores

    @property
    def compiled(self) -> EvictionMethod:
        return dataclasses.replace(super().compiled, scores=None)

    def priority(self, cached: Cached, xp: Any) -> Array:
        return cached.given
