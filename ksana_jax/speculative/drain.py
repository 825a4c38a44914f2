"""How long a batch without successors takes to end: steps become shorter only as rows end. NumPy, knows no engine.

So tokens of the rows that have most left to say save the most time, and those of a row that ends early may save none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Drain(NamedTuple):
    """Steps of a batch by how many rows are left.

    ranks: [J] rows, in order of the tokens that they have left, the most first, with which steps begin to take longer
      than without them. seconds: [J] by which they do.
    """

    ranks: np.ndarray
    seconds: np.ndarray

    @staticmethod
    def of(sizes: Sequence[int], seconds: Sequence[float], num_rows: int) -> Drain:
        """Returns that of num_rows rows; a step of up to sizes [J] rows, in ascending order, takes `seconds` [J]."""
        below = np.array([0, *sizes[:-1]])
        known = np.minimum(np.maximum.accumulate(seconds), seconds[-1])
        return Drain(below[below < num_rows], np.diff(known, prepend=0.0)[below < num_rows])

    def ends_after(self, left: np.ndarray) -> np.ndarray:
        """Returns the seconds [...] until all rows have ended, which have `left` [..., n] tokens to go."""
        return np.sort(left, axis=-1)[..., left.shape[-1] - 1 - self.ranks] @ self.seconds

    def saved_s(self, left: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the seconds [...] that plain decoding takes for `tokens` [..., n] of rows with `left` [n] to go."""
        return self.ends_after(left) - self.ends_after(left - tokens)
