"""Draft tokens of the rows of a step. NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Drafts(NamedTuple):
    """Tokens that may follow the newest one of each of n rows.

    ids: [n, K] int32; anything beyond a row's number. counts: [n] int32, how many there are of each row.
    """

    ids: np.ndarray
    counts: np.ndarray

    def shortened(self, most: np.ndarray) -> Drafts:
        """Returns drafts of at most `most` [n] tokens."""
        return Drafts(self.ids, np.minimum(self.counts, np.maximum(most, 0)))
