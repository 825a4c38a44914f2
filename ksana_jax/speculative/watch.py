"""Drafts that no step verifies: they are compared with the texts as these go on, which costs no time of the device.

Only what follows from texts alone can be judged so. Knows no costs.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from ksana_jax.step.drafts import Drafts


class _Guessed(NamedTuple):
    """Drafts [n] of rows; texts: [n] numbers of their texts. lengths: [n] tokens of the texts that they follow."""

    rows: np.ndarray
    texts: np.ndarray
    lengths: np.ndarray
    drafts: Drafts


class Watch:
    """Drafts that wait for their texts to go on.

    Args:
      num_rows: of the engine. most: draft tokens of a row.
    """

    def __init__(self, num_rows: int, most: int):
        self._most = most
        # Counts the texts that each row has had: drafts of one that has left are forgotten.
        self._texts = np.zeros(num_rows, np.int64)
        self._waiting: collections.deque[_Guessed] = collections.deque()

    def end(self, row: int) -> None:
        """Takes note that a text has left its row."""
        self._texts[row] += 1

    def add(self, rows: np.ndarray, lengths: np.ndarray, drafts: Drafts) -> None:
        """Adds drafts of rows [n] whose texts have `lengths` [n] tokens."""
        if np.count_nonzero(drafts.counts):
            self._waiting.append(_Guessed(rows, self._texts[rows], lengths.copy(), drafts))

    def judged(self, token_ids: np.ndarray, lengths: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns rows, the lengths of their drafts, and how many of those tokens their texts have, of each group of
        drafts that was added and is decided by now.

        Args:
          token_ids, lengths: [R, longest] and [R], the texts of all rows.
        """
        found = []
        while self._waiting:
            rows, texts, known, drafts = self._waiting[0]
            [longest] = drafts.lengths(np.array([self._most]))
            same = self._texts[rows] == texts
            if np.count_nonzero(same & (lengths[rows] < known + longest)):
                break
            self._waiting.popleft()
            at = np.minimum(known[:, None] + np.arange(drafts.ids.shape[1]), token_ids.shape[1] - 1)
            matched = drafts.matched(token_ids[rows[:, None], at])
            found.append((rows[same], longest[same], matched[same]))
        return found
