"""How long to draft: the length with the most tokens to be expected a second, by measured times of steps. NumPy.

A step costs what its padded shape costs, so the choice is between shapes, not numbers of tokens. A step with drafts
follows known texts, so the host cannot prepare it while the step before runs, and what is weighed is whole steps, host
included. What drafts lose against plain decoding is booked: an allowance, a small share of the time, pays for it.
Unless others wait for rows, a token saves what it brings the end of the batch nearer, see `Drain`.

Source: SmartSpec, Liu et al., arXiv:2406.14066, section 4, with measured times in place of a model of them.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ksana_jax.speculative.allowance import Allowance
from ksana_jax.speculative.drain import Drain
from ksana_jax.speculative.outcomes import Outcomes, tokens_of
from ksana_jax.speculative.rest import (
    LARGE_GAIN,
    LEAST_REST,
    LONGEST_MEMORY,
    LONGEST_RUN,
    MOST_REST,
    PAUSE,
    SHORT_RUN,
    Rest,
)
from ksana_jax.speculative.step_costs import StepCosts
from ksana_jax.step.buckets import Buckets
from ksana_jax.step.contract import Part
from ksana_jax.step.drafts import Drafts

# Drafts must promise so much more than plain decoding.
LEAST_GAIN = 1.05
# A shape must promise so much more than that of the step before, because a change takes time.
SWITCH = 1.1
# Shares of the time that may be lost: by drafts where texts are watched, by watching them, and by drafts where they are
# not. What may be lost at first, in plain steps: more where drafts that do not pay can only be tried.
LOSS, WATCHING, LOSS_UNWATCHED = 0.005, 0.005, 0.0075
FIRST_LOSS, FIRST_WATCHING, FIRST_UNWATCHED = 2, 8, 4
# What drafts that should pay may lose beyond that where acceptance was watched, because luck goes up and down: a share
# of the time so far, and the most, in plain steps. Then they pause until half of it is earned back.
DEBT, MOST_DEBT = 0.005, 8
# Steps after which it is seen whether it is.
IN_DEBT = 64
# Steps of a trial, in which drafts that promise nothing are verified, and the rest after which there is one. With all
# of them accepted, they must be so many times as fast as plain decoding: some will not be.
TRIAL, REST_BEFORE_TRIAL, TRIAL_GAIN = 4, 32, 1.2
# No step takes less time, whatever a coarse clock says.
LEAST_S = 1e-9
# Most rows whose texts are watched at once, and the least weight of an observation: in a rest others follow.
WATCHED, WEIGHT_WATCHED = 8, 0.1
# How many times as many tokens must be expected of a new text as of the last one whose drafts were weighed when it
# began, for its own to be weighed then: that takes half a step of a small model.
MORE_PROMISING = 1.1
# Most steps that are not observed between two that are, in a rest, because the host's notes on a step take time, too;
# and of how many of the rest so far they may be one. At first all are observed, so that drafts that pay are found soon.
UNSEEN, UNSEEN_SHARE = 47, 8


class Offer(NamedTuple):
    """Steps among which there is a choice: parts [m] with drafts, the draft tokens [m, 1] of a row that they hold, and
    their seconds [m]; and the one without drafts. drain: how the batch ends; None while others wait for rows."""

    plain: Part
    parts: tuple[Part, ...]
    most: np.ndarray
    seconds: np.ndarray
    drain: Drain | None


class Goodput:
    """Chooses the longest drafts of a step.

    Args:
      buckets: of the engine's steps. num_rows: of the engine. steps_per_call: see `StepCosts`.
      watches: whether drafts that are not verified are compared with the texts as these go on: then nothing is verified
        before it is known to pay. Otherwise drafts that do not pay are verified now and then, in trials.
    """

    def __init__(self, buckets: Buckets, num_rows: int, steps_per_call: int = 1, watches: bool = False):
        self._buckets, self._watches = buckets, watches
        self.costs = StepCosts(steps_per_call)
        most = max(part.width for part in buckets.verifications) - 1
        self.outcomes = Outcomes(num_rows, most, WEIGHT_WATCHED) if watches else Outcomes(num_rows, most)
        self._candidates: dict[tuple[int, int], tuple[tuple[Part, ...], np.ndarray]] = {}
        self._rests: collections.defaultdict[Part, Rest] = collections.defaultdict(Rest)
        # The last few seconds of the proposer, by the part of a step without drafts.
        self._proposals_s: collections.defaultdict[Part, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=3)
        )
        # Tokens [R] that each row has left at most; None while others wait for rows.
        self.left: np.ndarray | None = None
        # The part of the step before; None if it had others, or its time says nothing.
        self.last: Part | None = None
        self._asked = False
        # in_debt: until what was lost is earned back.
        self._allowance = Allowance(LOSS, FIRST_LOSS) if watches else Allowance(LOSS_UNWATCHED, FIRST_UNWATCHED)
        self._watching = Allowance(WATCHING, FIRST_WATCHING)
        self._in_debt = False
        # Tokens of a step with drafts of a new text, more than which must be expected for rests to end when it begins.
        self._least_promise = 0.0
        self._verified_s: float | None = None
        # Seconds for a row that is watched, the last ones; and rows at once.
        self._watch_s: float | None = None
        self._num_watched = 1

    def set_ahead(self, seconds: Mapping[Part, float]) -> None:
        """Takes the seconds that the device needs for steps, measured ahead of time: other steps have no drafts."""
        self.costs.set_ahead(seconds)
        self._candidates.clear()

    # ------------------------------------------------------------------ what has happened

    def observe_step(self, part: Part | None, seconds: float, waited_s: float) -> None:
        """Takes note of a step.

        Args:
          part: None of a step of another kind than decodes. seconds: from the end of the step before to its own.
          waited_s: of them, those in which the host waited for the device.
        """
        if part is None:
            self.last, self._asked, self._verified_s = None, False, None
            return
        known = self.costs.in_service(part)
        # One slow step in a while is the machine's, or a proposer's that compiles.
        most_s = 3 * known if known else 5 * self.costs.plain_s(Part(part.count, 1))
        booked = min(seconds, most_s) if most_s else seconds
        after_drafts = self.last is not None and self.last.width > 1
        self.costs.observe(part, seconds, waited_s, part != self.last, self._asked)
        if part.width > 1:
            self._verified_s = booked
        else:
            rest = self._rests[part]
            rest.step()
            if rest.number >= rest.memory:
                # What was measured may have been another program's load; less likely so each time.
                rest.number, rest.memory = 0, min(2 * rest.memory, LONGEST_MEMORY)
                self.costs.forget(part.count)
            # What is saved up pays for questions to the proposer too, and for the way back from drafts.
            lost = booked - (known or booked) if self._asked or after_drafts else 0.0
            self._pass_time(part, booked)
            self._allowance.lose(max(lost, 0.0))
        self.last, self._asked = part, False

    def _pass_time(self, plain: Part, seconds: float) -> None:
        if self.costs.is_measured(plain):
            for allowance in (self._allowance, self._watching):
                allowance.pass_time(seconds, self.costs.plain_s(plain))

    def observe_drafts(self, rows: np.ndarray, lengths: np.ndarray, num_accepted: np.ndarray) -> None:
        """Takes note of drafts of rows [n], all those of a step: of `lengths` [n] tokens num_accepted [n] were
        accepted."""
        if self._verified_s is not None:  # else it was not measured: something was compiled
            plain = self._plain(len(rows))
            saved_s = float(self._saved_s(self._drain(plain, len(rows)), plain, rows, 1 + num_accepted))
            self._pass_time(plain, self._verified_s)
            if self.costs.is_measured(plain):
                self._allowance.gain(saved_s - self._verified_s, self.costs.plain_s(plain))
            self._verified_s = None
        self.outcomes.observe_judged(rows, lengths, num_accepted)

    def observe_proposal(self, num_rows: int, seconds: float) -> None:
        """Takes note of the seconds that a proposer took for some rows. Where the step before had no drafts, they say
        little: a model that drafts then read the texts that were new to it."""
        if self.last is not None and self.last.width > 1:
            self._proposals_s[self._plain(num_rows)].append(seconds)

    def begin(self, row: int) -> bool:
        """Takes note that another text has entered a row; returns whether its drafts may pay, so that rests end."""
        self.outcomes.begin(row)
        if self._allowance.is_spent:
            return False
        if self._watches:  # which finds out before long whether its drafts pay
            if (promise := self.outcomes.of_new_text()) <= self._least_promise:
                return False
            self._least_promise = MORE_PROMISING * promise
        for rest in self._rests.values():
            rest.left = 0
        return True

    # ------------------------------------------------------------------ watching

    def to_watch(self, rows: np.ndarray) -> np.ndarray:
        """Returns those of rows [n] that decode, whose drafts are to be compared with their texts: the ones of which
        least is known, as many as are worth the time."""
        plain = self._plain(len(rows))
        rests = self.rests_for_now(plain) and not self._rests[plain].drafts and self.costs.is_measured(plain)
        if not (rests and self._watches) or self._watching.is_spent or self._owes(plain):
            return rows[:0]
        affordable = int((self._watching.left_s or 0.0) / self._watch_s) if self._watch_s else 1
        most = min(affordable, 2 * self._num_watched, WATCHED)
        if most < 1:
            return rows[:0]
        return rows if most >= len(rows) else rows[np.argpartition(self.outcomes.number(rows), most)[:most]]

    def observe_watch(self, num_watched: int, seconds: float) -> None:
        """Takes note of the seconds of the host for all that `to_watch` had asked for, `watched` included."""
        self._watch_s, self._num_watched = seconds / num_watched, num_watched
        self._watching.lose(seconds)

    def watched(self, rows: np.ndarray, most: int) -> None:
        """Considers again whether drafts of rows [n] that decode pay; most: draft tokens of a row."""
        plain = self._plain(len(rows))
        if self._best(self._offer(rows, most), rows, np.full(len(rows), most)) is not None:
            rest = self._rests[plain]
            rest.left, rest.last, rest.drafts = 0, 0, True

    def unseen(self, num_rows: int) -> int:
        """Returns how many of the next steps need not be observed, as long as they are like the last one: a rest goes
        on meanwhile."""
        plain = self._plain(num_rows)
        rest = self._rests[plain]
        if self._allowance.left_s is None or plain != self.last or self.costs.within_call(plain):
            return 0
        # `observe_step` counts a step itself, and the last one of a rest is to be seen.
        count = max(min(UNSEEN, rest.number // UNSEEN_SHARE, rest.left - 1), 0)
        rest.step(count)
        self._pass_time(plain, count * self.costs.plain_s(plain))
        return count

    # ------------------------------------------------------------------ choices

    def rests(self, rows: np.ndarray, most: int) -> bool:
        """Whether a step of decodes of rows [n] goes without drafts, so that the engine need not wait for tokens.

        Args:
          most: draft tokens of a row.
        """
        plain = self._plain(len(rows))
        if self.rests_for_now(plain):
            return True
        rest = self._rests[plain]
        rest.drafts = rest.drafts or self.asks(rows, np.full(len(rows), most)) is not None
        return not rest.drafts

    def rests_for_now(self, plain: Part) -> bool:
        """Whether nothing is to be considered: in a rest, or as long as too little is known."""
        unknown = not self.costs.is_measured(plain) or (self._watches and self._watch_s is None)
        return unknown or self._rests[plain].left > 0

    def asks(self, rows: np.ndarray, most: np.ndarray) -> Offer | None:
        """Returns an offer if drafts of up to `most` [n] tokens of rows [n] could pay, or are due for a trial: else it
        is not worth the time to make them, and a rest begins."""
        if not np.count_nonzero(most):
            return None
        plain = self._plain(len(rows))
        rest = self._rests[plain]
        if rest.run >= rest.longest:
            rest.run, rest.left = 0, PAUSE
            return None
        if self._owes(plain):  # which says nothing of these drafts
            rest.left, rest.drafts = IN_DEBT, False
            return None
        offer = self._offer(rows, int(most.max()))
        if rest.run % LEAST_REST and self.last is not None and self.last.width > 1:
            return offer  # what was found a few steps ago holds, and drafts are weighed once they are there
        if self._best(offer, rows, most) is not None or self._on_trial(offer, np.minimum(most, offer.most)):
            return offer
        rest.begin(MOST_REST if self._watches else LEAST_REST)
        return None

    def _owes(self, plain: Part) -> bool:
        """Whether drafts pause until what they have lost is earned back."""
        allowance, least_s = self._allowance, 0.0
        if self._watches:
            least_s = -min(DEBT * allowance.passed_s, MOST_DEBT * self.costs.plain_s(plain))
        self._in_debt = (allowance.left_s or 0.0) < (least_s / 2 if self._in_debt else least_s)
        return self._in_debt

    def choose(self, offer: Offer, rows: np.ndarray, drafts: Drafts | None) -> int:
        """Returns the most draft tokens of each row in this step, 0 for none.

        Args:
          offer: of `asks` for rows [n]. drafts: of the rows, None if there are none.
        """
        self._asked = True
        rest = self._rests[offer.plain]
        if drafts is None or not np.count_nonzero(drafts.counts):
            self.outcomes.observe_found(rows, np.zeros(len(rows)))
            if not self._watches:
                rest.begin(1)
            return 0
        lengths = drafts.lengths(offer.most[:, 0])
        self.outcomes.observe_found(rows, lengths[-1])
        # What has been done for them has been done: they must be better than a step that begins now without them.
        tokens = tokens_of(self.outcomes.acceptance(rows), lengths)
        gains = self._gains(offer, rows, tokens, offer.seconds)
        gains *= self.costs.alone_s(offer.plain) / max(self.costs.plain_s(offer.plain), LEAST_S)
        if (part := self._most_promising(offer, gains)) is not None:
            rest.last, rest.trial, rest.run, rest.number, rest.drafts = 0, None, rest.run + 1, 0, True
            rest.longest = LONGEST_RUN if gains[offer.parts.index(part)] >= LARGE_GAIN else SHORT_RUN
            if rest.run > 2 * LEAST_REST:
                rest.memory, self._least_promise = MOST_REST, 0.0
            return part.width - 1
        if part := self._on_trial(offer, lengths):
            if rest.trial is None:
                rest.trial = TRIAL
                self.outcomes.weigh_anew(rows)
            rest.trial -= 1
            return part.width - 1
        rest.begin(MOST_REST if self._watches else LEAST_REST)
        return 0

    def _best(self, offer: Offer, rows: np.ndarray, most: np.ndarray) -> Part | None:
        """Returns the part that promises the most tokens a second before anything is drafted; None if that is not more
        than without drafts."""
        if not offer.parts:
            return None
        share, length = self.outcomes.found(rows)
        lengths = np.minimum(np.minimum(length, most), offer.most)
        tokens = 1 + share * (tokens_of(self.outcomes.acceptance(rows), lengths) - 1)
        # A step has drafts if one of its rows has.
        none = np.multiply.reduce(1 - share)
        seconds = (1 - none) * offer.seconds + none * max(self.costs.alone_s(offer.plain), LEAST_S)
        return self._most_promising(offer, self._gains(offer, rows, tokens, seconds))

    def _gains(self, offer: Offer, rows: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Returns how many times as fast as plain decoding steps [m] are that yield tokens [m, n] in `seconds` [m]."""
        return self._saved_s(offer.drain, offer.plain, rows, tokens) / seconds

    def _saved_s(self, drain: Drain | None, plain: Part, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the seconds [...] that plain decoding takes for tokens [..., n] of rows [n]. While others wait for
        rows, steps stay as long as they are, whichever rows end."""
        if drain is None or self.left is None:
            return np.add.reduce(tokens, axis=-1) * (self.costs.plain_s(plain) / len(rows))
        return drain.saved_s(self.left[rows], tokens)

    def _drain(self, plain: Part, num_rows: int) -> Drain | None:
        if self.left is None:
            return None
        sizes = [count for count in self._buckets.decodes if count < plain.count] + [plain.count]
        return Drain.of(sizes, self.costs.of_fewer(plain, sizes), num_rows)

    def _most_promising(self, offer: Offer, gains: np.ndarray) -> Part | None:
        if not offer.parts:
            return None
        by_part = gains.tolist()
        at = max(range(len(by_part)), key=lambda i: by_part[i] * (SWITCH if offer.parts[i] == self.last else 1))
        return offer.parts[at] if by_part[at] >= LEAST_GAIN else None

    def _on_trial(self, offer: Offer, lengths: np.ndarray) -> Part | None:
        """Returns the smallest part that pays if drafts of `lengths` [m, n] are accepted, while a trial is under way or
        can be afforded."""
        rest, plain_s = self._rests[offer.plain], self.costs.plain_s(offer.plain)
        if self._watches or not offer.parts or rest.trial == 0 or rest.last < REST_BEFORE_TRIAL:
            return None
        gains = (1 + lengths).mean(axis=1) * plain_s / offer.seconds
        at = next((i for i, gain in enumerate(gains.tolist()) if gain >= TRIAL_GAIN), None)
        if at is None or rest.trial:
            return None if at is None else offer.parts[at]
        # As long as nothing is accepted, and a step until the device has its data again.
        trial_s = TRIAL * (offer.seconds[at] - plain_s) + plain_s
        return offer.parts[at] if trial_s <= (self._allowance.left_s or 0.0) else None

    def _offer(self, rows: np.ndarray, most: int) -> Offer:
        plain, (parts, holds) = self._plain(len(rows)), self._parts(len(rows), most)
        seconds = np.array([self._seconds(part, plain) for part in parts])
        return Offer(plain, parts, holds, seconds, self._drain(plain, len(rows)))

    def _seconds(self, part: Part, plain: Part) -> float:
        """Returns the seconds of a step with drafts, those of the proposer included."""
        seconds = self.costs.seconds(part, plain)
        if self.costs.in_service(part) is None:
            seconds += min(self._proposals_s[plain], default=0.0)
        return max(seconds, LEAST_S)

    def _parts(self, num_rows: int, most: int) -> tuple[tuple[Part, ...], np.ndarray]:
        """Returns for each width the smallest part for num_rows rows, up to the first that holds `most` drafts, none
        whose program would have to be compiled in service; and the draft tokens [m, 1] of a row that each holds."""
        found = self._candidates.get((num_rows, most))
        if found is None:
            parts: dict[int, Part] = {}
            for part in self._buckets.verifications:
                if part.count >= num_rows and self.costs.may_run(part):
                    parts.setdefault(part.width, part)
            by_width = sorted(parts.values(), key=lambda part: part.width)
            chosen = tuple(by_width[: 1 + sum(part.width <= most for part in by_width)])
            found = chosen, np.array([part.width - 1 for part in chosen], int)[:, None]
            self._candidates[num_rows, most] = found
        return found

    def _plain(self, num_rows: int) -> Part:
        return Part(self._buckets.num_sampled(num_rows), 1)
