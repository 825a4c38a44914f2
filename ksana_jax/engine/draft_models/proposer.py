"""The proposer of a draft model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.draft_models.small_model import SmallModel
from ksana_jax.scheduler.speculative.base import Proposer, Texts
from ksana_jax.scheduler.step.drafts import Drafts


class DraftModelProposer(Proposer):
    """Decodes with a small model, one token more than it drafts, so that the last draft token is computed too.

    Args:
      length: maximum tokens of a draft.
      distributions: whether drafts come with the distributions that they were drawn from.

    Attributes:
      least: log-probability below which a token ends its draft, see `SmallModel.decode`; None without such an end.
    """

    needs_blocks = True
    least: np.float32 | None = None

    def __init__(self, model: SmallModel, length: int, distributions: bool):
        self.model, self._length, self._distributions = model, length, distributions
        self.drawn_shapes = [(length + 1, model.num_sampled)] if distributions else []

    def set_patterns(self, patterns: Sequence[AttentionPattern]) -> None:
        self.model.set_patterns(patterns)

    def keep_up(self, texts: Texts, rows: np.ndarray) -> None:
        assert texts.rows is not None
        if self.model.resets_scores:
            self.model.catch_up(texts.rows, rows)

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        self.model.num_computed[row] = 0

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        """Keeps no state of a text."""

    def warm_up(self, max_width: int, samples: bool, workers: int) -> None:
        """Compiles ahead of time; see `SmallModel.warm_up`."""
        self.model.warm_up(max_width, self._length, samples, self._distributions, workers, self.least is not None)

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        if not most.any():
            return Drafts(np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int32))
        assert texts.rows is not None
        self.model.catch_up(texts.rows, rows)
        return self.model.decode(texts.rows, rows, most, self._length, self._distributions, self.least)
