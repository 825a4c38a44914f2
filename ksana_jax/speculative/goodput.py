"""How long to draft: the length with the most tokens to be expected a second, by measured times of steps. NumPy.

A step costs what its padded shape costs, so the choice is between shapes, not numbers of tokens.

Source: SmartSpec, Liu et al., arXiv:2406.14066, section 4, with measured times in place of a model of them.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from ksana_jax.step.buckets import Buckets
from ksana_jax.step.contract import Part

# Weight of a new measurement, of a step's seconds and of what became of a draft.
NEW_STEP, NEW_DRAFT = 0.2, 0.1
# Measurements of a shape before its seconds are trusted.
FEW = 3
# Drafts must promise so much more than plain decoding.
LEAST_GAIN = 1.03
# Steps without drafts after drafts did not pay, doubled each time in turn up to the most.
LEAST_REST, MOST_REST = 8, 256


@dataclasses.dataclass
class _Rest:
    """Steps of one shape without drafts. left: until drafts are tried again. last: how many there were last time."""

    left: int = 0
    last: int = 0
    tries: bool = False

    def step(self) -> None:
        if self.left:
            self.left -= 1
            self.tries = not self.left


class Goodput:
    """Chooses the longest drafts of a step.

    Args:
      buckets: of the engine's steps. num_rows: of the engine.
    """

    def __init__(self, buckets: Buckets, num_rows: int):
        self._buckets = buckets
        self.seconds: dict[Part, float] = {}
        self._num_measured: dict[Part, int] = {}
        # Of all rows and of each: accepted draft tokens and drafts that were rejected somewhere, older ones weigh less.
        self._accepted, self._rejected = np.zeros(num_rows), np.zeros(num_rows)
        self._all = np.array([1.0, 1.0])
        self._rests: collections.defaultdict[Part, _Rest] = collections.defaultdict(_Rest)

    def observe_step(self, part: Part, seconds: float) -> None:
        """Takes note of the seconds from the end of the step before to that of a step of one part."""
        known = self.seconds.get(part, seconds)
        self._num_measured[part] = number = self._num_measured.get(part, 0) + 1
        weight = max(NEW_STEP, 1 / number)
        # One slow step in a while is the machine's.
        self.seconds[part] = known + weight * (min(seconds, 3 * known) - known)
        if part.width == 1:
            self._rests[part].step()

    def observe_drafts(self, rows: np.ndarray, counts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Takes note of drafts of rows [n]: of `counts` [n] tokens num_accepted [n] were accepted."""
        drafted = counts > 0
        rows, accepted, rejected = rows[drafted], num_accepted[drafted], (num_accepted < counts)[drafted]
        self._accepted[rows] += NEW_DRAFT * accepted - NEW_DRAFT * self._accepted[rows]
        self._rejected[rows] += NEW_DRAFT * rejected - NEW_DRAFT * self._rejected[rows]
        if len(rows):
            self._all += NEW_DRAFT * (np.array([accepted.mean(), rejected.mean()]) - self._all)

    def begin(self, row: int) -> None:
        """Takes note that another text has entered a row: it is expected to be like all others."""
        self._accepted[row], self._rejected[row] = self._all

    def acceptance(self, rows: np.ndarray) -> np.ndarray:
        """Returns the probability [n] that a row's next draft token is accepted, given that those before it are."""
        accepted, rejected = self._accepted[rows], self._rejected[rows]
        return np.minimum(accepted / np.maximum(accepted + rejected, 1e-9), 0.999)

    def rests(self, num_rows: int) -> bool:
        """Whether steps of num_rows decodes go without drafts, so that the engine need not wait for tokens."""
        part = self._plain(num_rows)
        return self._num_measured.get(part, 0) < FEW or self._rests[part].left > 0

    def choose(self, rows: np.ndarray, counts: np.ndarray) -> int:
        """Returns the most draft tokens of each row in this step, 0 for none.

        Args:
          rows: [n] rows. counts: [n] draft tokens of each.
        """
        plain, parts = self._plain(len(rows)), self._candidates(len(rows), int(counts.max(initial=0)))
        rest = self._rests[plain]
        for part in parts:
            if self._num_measured.get(part, 0) < FEW:
                return part.width - 1
        acceptance = self.acceptance(rows)
        gains = [self._tokens(acceptance, np.minimum(counts, p.width - 1)) / self.seconds[p] for p in parts]
        at = int(np.argmax(gains))
        if gains[at] >= LEAST_GAIN * len(rows) / self.seconds[plain]:
            rest.last = 0
            return parts[at].width - 1
        if rest.tries:  # what becomes of drafts is not known from steps without them
            rest.tries = False
            return parts[-1].width - 1
        rest.left = rest.last = min(max(2 * rest.last, LEAST_REST), MOST_REST)
        return 0

    def _candidates(self, num_rows: int, most: int) -> list[Part]:
        """Returns for each width the smallest part for num_rows rows, up to the first that holds `most` drafts."""
        parts: dict[int, Part] = {}
        for part in self._buckets.verifications:
            if part.count >= num_rows:
                parts.setdefault(part.width, part)
        found = sorted(parts.values(), key=lambda part: part.width)
        return found[: 1 + sum(part.width <= most for part in found)]

    def _plain(self, num_rows: int) -> Part:
        return next(Part(count, 1) for count in self._buckets.decodes if count >= num_rows)

    @staticmethod
    def _tokens(acceptance: np.ndarray, counts: np.ndarray) -> float:
        """Returns the tokens that rows yield together, (1 - a^(k + 1)) / (1 - a) of a row with k draft tokens."""
        return float(((1 - acceptance ** (counts + 1)) / (1 - acceptance)).sum())
