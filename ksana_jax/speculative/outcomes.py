"""What to expect of drafts, by what has become of those before: moving averages of each row. NumPy.

Source: E = (1 - a^(k + 1)) / (1 - a) tokens of a step with k draft tokens, Leviathan et al., arXiv:2211.17192.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # NumPy's, or a number

# Least weight of a new observation, for the averages of all.
NEW = 0.02
# Observations that a new text is taken to have had, with the averages of all texts.
IMAGINED = 2


class Outcomes:
    """Averages of each row, and of all texts.

    Args:
      num_rows: of the engine. most: draft tokens of a row in a step. least_weight: of a new observation of a row: large
        if texts are to be noticed soon that take another turn, small if chance is to count for little.
    """

    def __init__(self, num_rows: int, most: int, least_weight: float = NEW):
        self._least_weight = least_weight
        # Of each row, and in the last column of all: accepted draft tokens, and drafts that were rejected somewhere;
        # drafts that were found, and tokens of a draft, 0 of one that was not.
        self._judged, self._found = np.ones((2, num_rows + 1)), np.ones((2, num_rows + 1))
        self._found[1] = most
        # Of how many drafts these are averages.
        self._num_judged, self._num_found = np.full((2, num_rows + 1), IMAGINED)

    def begin(self, row: int) -> None:
        """Takes note that another text has entered a row: it is expected to be like all others."""
        self._judged[:, row], self._found[:, row] = self._judged[:, -1], self._found[:, -1]
        self._num_judged[row] = self._num_found[row] = IMAGINED

    def of_new_text(self) -> float:
        """Returns the tokens to be expected of a step with drafts of a text of which nothing is known."""
        (accepted, rejected), (share, length) = self._judged[:, -1].tolist(), self._found[:, -1].tolist()
        acceptance = min(accepted / max(accepted + rejected, 1e-9), 0.999)
        return 1 + share * (tokens_of(acceptance, length / max(share, 1e-9)) - 1)

    def weigh_anew(self, rows: np.ndarray) -> None:
        """Lets the next drafts of some rows count as those of new texts do."""
        for which in (rows, -1):
            self._num_judged[which] = np.minimum(self._num_judged[which], IMAGINED)

    def number(self, rows: np.ndarray) -> np.ndarray:
        """Returns of how many drafts [n] of each row it is known whether they were found."""
        return self._num_found[rows]

    def observe_found(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Takes note of the drafts of rows [n] for which a proposer was asked; lengths: [n], 0 where it found none."""
        self._average(self._found, self._num_found, rows, np.array([lengths > 0, lengths], float))

    def observe_judged(self, rows: np.ndarray, lengths: np.ndarray, num_accepted: np.ndarray) -> None:
        """Takes note of drafts of rows [n], all those of a step: of `lengths` [n] tokens num_accepted [n] were
        accepted; rows without a draft do not count."""
        if not np.count_nonzero(lengths):
            return
        if np.count_nonzero(lengths) < len(rows):
            rows, lengths, num_accepted = (x[lengths > 0] for x in (rows, lengths, num_accepted))
        self._average(self._judged, self._num_judged, rows, np.array([num_accepted, num_accepted < lengths], float))

    def _average(self, averages: np.ndarray, numbers: np.ndarray, rows: np.ndarray, new: np.ndarray) -> None:
        """Moves averages [2, R + 1] of rows [n] towards new values [2, n], and those of all towards their mean."""
        numbers[rows] += 1
        numbers[-1] += 1
        old, of_all = averages[:, rows], averages[:, -1]
        averages[:, rows] = old + np.maximum(self._least_weight, 1 / numbers[rows]) * (new - old)
        of_all += max(NEW, 1 / numbers[-1]) * (np.add.reduce(new, axis=1) / len(rows) - of_all)

    def acceptance(self, rows: np.ndarray) -> np.ndarray:
        """Returns the probability [n] that a row's next draft token is accepted, given that those before it are."""
        accepted, rejected = _expected(self._judged, self._num_judged, rows)
        return np.minimum(accepted / np.maximum(accepted + rejected, 1e-9), 0.999)

    def found(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the probability [n] that a draft is found for a row, and the length [n] that it then has."""
        share, length = _expected(self._found, self._num_found, rows)
        return share, length / np.maximum(share, 1e-9)


def _expected(averages: np.ndarray, numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns averages [2, n] of rows [n]; the less is known of a row, the more they are those of all texts."""
    return averages[:, rows] + IMAGINED / np.maximum(numbers[rows], IMAGINED) * (averages[:, -1:] - averages[:, rows])


def tokens_of(acceptance: Array, lengths: Array) -> Array:
    """Returns the tokens [m, n] to be expected of rows [n] from a step with drafts of `lengths` [m, n], the model's own
    token included."""
    rejected = 1 - acceptance
    return (1 - acceptance ** (lengths + 1)) / rejected
