"""Draft tokens of the rows of a step. NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = Any  # NumPy on the host, jax inside a compiled step


class Drafts(NamedTuple):
    """Tokens that may follow the newest one of each of n rows.

    ids: [n, K] int32; anything beyond a row's number. counts: [n] int32, how many there are of each row.
    drawn_from: [at least K, at least n, V] on the device, the distribution that each token was drawn from; None where
      a proposer has drawn none, but guesses.
    rollback: [] float32, threshold of the rule "bild", see `accept_bild`; None with other rules.
    """

    ids: Array
    counts: Array
    drawn_from: Array | None = None
    rollback: Array | None = None

    def shortened(self, most: np.ndarray) -> Drafts:
        """Returns drafts of at most `most` [n] tokens."""
        return self._replace(counts=np.minimum(self.counts, np.maximum(most, 0)))
