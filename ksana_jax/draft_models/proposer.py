"""The proposer of a draft model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ksana_jax.draft_models.small_model import SmallModel
from ksana_jax.speculative.base import Proposer, Texts
from ksana_jax.step.drafts import Drafts


class DraftModelProposer(Proposer):
    """Decodes with a small model, one token more than it drafts, so that the last draft token is computed too.

    Args:
      lengths: numbers of draft tokens for which it is compiled.
    """

    needs_blocks = True

    def __init__(self, model: SmallModel, most: int, lengths: Sequence[int]):
        self.model, self.most, self._lengths = model, most, tuple(lengths)

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        self.model.num_computed[row] = 0

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        """Nothing is kept of a text."""

    def warm_up(self, max_width: int, samples: bool, workers: int) -> None:
        """Compiles ahead of time; see `SmallModel.warm_up`."""
        self.model.warm_up(max_width, self._lengths, samples, workers)

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        ids = np.zeros((len(rows), self.most), np.int32)
        at = np.flatnonzero(most)
        if len(at):
            assert texts.rows is not None
            longest = int(most.max())
            length = next(length for length in self._lengths if length >= longest)
            self.model.catch_up(texts.rows, rows[at])
            ids[at, :length] = self.model.decode(texts.rows, rows[at], most[at], length)
        # A token without finite scores is -1, which is no draft.
        usable = np.cumprod(ids >= 0, axis=1).sum(axis=1)
        return Drafts(np.maximum(ids, 0), np.minimum(most, usable).astype(np.int32))
