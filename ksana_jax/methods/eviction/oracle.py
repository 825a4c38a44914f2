"""Knowledge of the future as a control: attention from the rest of the text."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(EvictionMethod):
    """Keeps the tokens that receive the most attention from future queries, and recent tokens.

    No method can know that while a text is generated, so it only scores texts, whose attention with the full cache is
    computed beforehand. It cannot foresee how evictions change that attention, so a method may be better by chance.

    Args:
      future: of one text, see `lab.runs.oracle.future_attention`, which computes it.
    """

    recent: float | int = 0.5
    future: Any = dataclasses.field(default=None, compare=False, repr=False)

    needs_full_text: ClassVar[bool] = True

    @property
    def needs_text_positions(self) -> bool:
        return True

    @property
    def num_known(self) -> int:
        return 0 if self.future is None else self.future.shape[-1]

    def given(self, group: int, lengths: np.ndarray) -> np.ndarray | None:
        return None if self.future is None else np.moveaxis(self.future[group][:, :, lengths], 2, 0)

    @property
    def compiled(self) -> EvictionMethod:
        return dataclasses.replace(super().compiled, future=None)

    def priority(self, cached: Cached, xp: Any) -> Array:
        return cached.given
