"""How long to draft: the length with the most tokens to be expected a second, by measured times of steps. NumPy.

A step costs what its padded shape costs, so the choice is between shapes, not numbers of tokens. What drafts lose
against plain decoding is booked: an allowance, a small share of the time, pays for it.

Source: SmartSpec, Liu et al., arXiv:2406.14066, section 4, with measured times in place of a model of them.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from ksana_jax.speculative.step_costs import StepCosts
from ksana_jax.step.buckets import Buckets
from ksana_jax.step.contract import Part

# Least weight of a new measurement of what became of a draft.
NEW_DRAFT = 0.05
# Drafts must promise so much more than plain decoding.
LEAST_GAIN = 1.03
# A shape must promise so much more than that of the step before, because a change takes time.
SWITCH = 1.1
# Share of the time that drafts may lose, and what of it may be saved up and is there at first, in plain steps.
LOSS, MOST_SAVED, FIRST_SAVED = 0.01, 16, 5
# Steps without drafts after drafts did not pay, doubled each time in turn up to the most; 1 at first where the proposer
# found none.
LEAST_REST, MOST_REST = 8, 256
# Steps of a trial, in which drafts that promise nothing are verified, and the rest after which there is one.
TRIAL, REST_BEFORE_TRIAL = 4, 32
# Steps with drafts after which a few have none, to see what these take by now.
LONGEST_RUN, PAUSE = 256, 5


@dataclasses.dataclass
class _Rest:
    """Steps of one shape without drafts.

    left: until drafts are asked for again. last: how many there were last time. trial: steps that it still has.
    run: steps with drafts since the last one without.
    """

    left: int = 0
    last: int = 0
    trial: int = 0
    run: int = 0

    def begin(self, least: int) -> None:
        """Begins a rest twice as long as the last one."""
        self.left = self.last = min(max(2 * self.last, least), MOST_REST)
        self.trial = self.run = 0

    def step(self) -> None:
        self.left = max(self.left - 1, 0)


class Goodput:
    """Chooses the longest drafts of a step.

    Args:
      buckets: of the engine's steps. num_rows: of the engine. steps_per_call: see `StepCosts`.
    """

    def __init__(self, buckets: Buckets, num_rows: int, steps_per_call: int = 1):
        self._buckets = buckets
        self.costs = StepCosts(steps_per_call)
        # Of all rows and of each: accepted draft tokens, drafts that were rejected somewhere, and of how many drafts
        # this is the mean; the first two drafts are imagined.
        self._accepted, self._rejected = np.zeros(num_rows), np.zeros(num_rows)
        self._number = np.zeros(num_rows)
        self._all, self._number_of_all = np.array([1.0, 1.0]), 2
        self._rests: collections.defaultdict[Part, _Rest] = collections.defaultdict(_Rest)
        # The last few seconds of the proposer, by the part of a step without drafts.
        self._proposals_s: collections.defaultdict[Part, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=3)
        )
        self._last: Part | None = None
        self._asked = False
        # Seconds that drafts may still lose; None until plain steps are measured.
        self._allowance_s: float | None = None
        self._verified_s: float | None = None

    def observe_step(self, part: Part, seconds: float) -> None:
        """Takes note of the seconds from the end of the step before to that of a step of one part."""
        known = self.costs.in_service(part)
        # One slow step in a while is the machine's, or a proposer's that compiles.
        most_s = 3 * known if known else 5 * self.costs.plain_s(Part(part.count, 1))
        booked = min(seconds, most_s) if most_s else seconds
        after_drafts = self._last is not None and self._last.width > 1
        is_first = part != self._last or (part.width == 1 and self._asked)
        self.costs.observe(part, seconds, is_first)
        if part.width > 1:
            self._verified_s = booked
        else:
            self._rests[part].step()
            # What is saved up pays for questions to the proposer too, and for the way back from drafts.
            lost = booked - (known or booked) if self._asked or after_drafts else 0.0
            self._book(part, LOSS * booked - max(lost, 0.0))
        self._last, self._asked = part, False

    def _book(self, plain: Part, saved_s: float) -> None:
        if not self.costs.is_measured(plain):
            return
        plain_s = self.costs.plain_s(plain)
        if self._allowance_s is None:
            self._allowance_s = FIRST_SAVED * plain_s
        self._allowance_s = min(self._allowance_s + saved_s, MOST_SAVED * plain_s)

    def observe_drafts(self, rows: np.ndarray, counts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Takes note of drafts of rows [n], all those of a step: of `counts` [n] tokens num_accepted [n] were
        accepted."""
        if self._verified_s is not None:  # else it was not measured: something was compiled
            plain = self._plain(len(rows))
            steps_saved = 1 + num_accepted.sum() / len(rows)
            self._book(plain, LOSS * self._verified_s + steps_saved * self.costs.plain_s(plain) - self._verified_s)
            self._verified_s = None
        drafted = counts > 0
        rows, accepted, rejected = rows[drafted], num_accepted[drafted], (num_accepted < counts)[drafted]
        self._number[rows] += 1
        weight = np.maximum(NEW_DRAFT, 1 / self._number[rows])
        self._accepted[rows] += weight * (accepted - self._accepted[rows])
        self._rejected[rows] += weight * (rejected - self._rejected[rows])
        if len(rows):
            self._number_of_all += 1
            weight = max(NEW_DRAFT, 1 / self._number_of_all)
            self._all += weight * (np.array([accepted.mean(), rejected.mean()]) - self._all)

    def begin(self, row: int) -> None:
        """Takes note that another text has entered a row: it is expected to be like all others."""
        self._accepted[row], self._rejected[row] = self._all
        self._number[row] = 2

    def acceptance(self, rows: np.ndarray) -> np.ndarray:
        """Returns the probability [n] that a row's next draft token is accepted, given that those before it are."""
        accepted, rejected = self._accepted[rows], self._rejected[rows]
        return np.minimum(accepted / np.maximum(accepted + rejected, 1e-9), 0.999)

    def rests(self, num_rows: int) -> bool:
        """Whether steps of num_rows decodes go without drafts, so that the engine need not wait for tokens."""
        plain = self._plain(num_rows)
        return not self.costs.is_measured(plain) or self._rests[plain].left > 0

    def asks(self, rows: np.ndarray, most: np.ndarray) -> bool:
        """Whether drafts of up to `most` [n] tokens of rows [n] could pay, or are due for a trial: else it is not worth
        the time to make them, and a rest begins."""
        rest = self._rests[self._plain(len(rows))]
        if not np.count_nonzero(most):
            return False
        if rest.run == LONGEST_RUN:
            rest.run, rest.left = 0, PAUSE
            return False
        if (self._allowance_s or 0.0) < 0:  # which says nothing of these drafts
            rest.left = LEAST_REST
        elif self._paying(rows, most) or self._on_trial(rows, most):
            return True
        else:
            rest.begin(LEAST_REST)
        return False

    def observe_proposal(self, num_rows: int, seconds: float) -> None:
        """Takes note of the seconds that a proposer took for some rows. Where the step before had no drafts, they say
        little: a model that drafts then read the texts that were new to it."""
        if self._last is not None and self._last.width > 1:
            self._proposals_s[self._plain(num_rows)].append(seconds)

    def choose(self, rows: np.ndarray, counts: np.ndarray) -> int:
        """Returns the most draft tokens of each row in this step, 0 for none.

        Args:
          rows: [n] rows. counts: [n] draft tokens of each.
        """
        self._asked = True
        rest = self._rests[self._plain(len(rows))]
        if not np.count_nonzero(counts):
            rest.begin(1)
        elif part := self._paying(rows, counts):
            rest.last, rest.trial, rest.run = 0, max(rest.trial - 1, 0), rest.run + 1
            return part.width - 1
        elif part := self._on_trial(rows, counts):
            if not rest.trial:
                rest.trial = TRIAL
                self._number[rows] = np.minimum(self._number[rows], 2)  # what it finds weighs as in a new text
            rest.trial -= 1
            return part.width - 1
        else:
            rest.begin(LEAST_REST)
        return 0

    def _paying(self, rows: np.ndarray, counts: np.ndarray) -> Part | None:
        """Returns the part that promises the most tokens a second; None if that is not more than without drafts."""
        parts, gains = self._promised(self.acceptance(rows), counts)
        if not parts:
            return None
        at = int(np.argmax([gain * (SWITCH if part == self._last else 1) for gain, part in zip(gains, parts)]))
        return parts[at] if gains[at] >= LEAST_GAIN else None

    def _on_trial(self, rows: np.ndarray, counts: np.ndarray) -> Part | None:
        """Returns the smallest part that pays if all is accepted, while a trial is under way or can be afforded."""
        parts, gains = self._promised(np.full(len(rows), 0.999), counts)
        part = next((part for part, gain in zip(parts, gains) if gain >= LEAST_GAIN), None)
        plain = self._plain(len(rows))
        rest, plain_s = self._rests[plain], self.costs.plain_s(plain)
        if part is None or rest.trial:
            return part
        # As long as nothing is accepted, and a step until the device has its data again.
        trial_s = TRIAL * (self._seconds(part, plain) - plain_s) + plain_s
        return part if rest.last >= REST_BEFORE_TRIAL and trial_s <= (self._allowance_s or 0.0) else None

    def _promised(self, acceptance: np.ndarray, counts: np.ndarray) -> tuple[list[Part], list[float]]:
        """Returns parts for drafts of `counts` [n] tokens, and of each the tokens to be expected in the time of a token
        without drafts."""
        plain = self._plain(len(counts))
        parts = self._candidates(len(counts), int(counts.max(initial=0)))
        if not parts:
            return [], []
        seconds = np.array([self._seconds(part, plain) for part in parts])
        return parts, (self._gains(acceptance, counts, parts) * self.costs.plain_s(plain) / seconds).tolist()

    def _seconds(self, part: Part, plain: Part) -> float:
        """Returns the seconds of a step with drafts, those of the proposer included."""
        seconds = self.costs.seconds(part, plain)
        if self.costs.in_service(part) is None:
            seconds += min(self._proposals_s[plain], default=0.0)
        return seconds

    def _candidates(self, num_rows: int, most: int) -> list[Part]:
        """Returns for each width the smallest part for num_rows rows, up to the first that holds `most` drafts; none
        without drafts, or whose program would have to be compiled in service."""
        parts: dict[int, Part] = {}
        for part in self._buckets.verifications:
            if most and part.count >= num_rows and self.costs.may_run(part):
                parts.setdefault(part.width, part)
        found = sorted(parts.values(), key=lambda part: part.width)
        return found[: 1 + sum(part.width <= most for part in found)]

    def _plain(self, num_rows: int) -> Part:
        return next(Part(count, 1) for count in self._buckets.decodes if count >= num_rows)

    @staticmethod
    def _gains(acceptance: np.ndarray, counts: np.ndarray, parts: list[Part]) -> np.ndarray:
        """Returns the tokens of a row to be expected from a step of each part, (1 - a^(k + 1)) / (1 - a) of a row with
        k draft tokens, as a mean over rows."""
        most = np.array([[part.width - 1] for part in parts])
        return ((1 - acceptance ** (np.minimum(counts, most) + 1)) / (1 - acceptance)).mean(axis=1)
