"""Chooses how many tokens to draft: the length with the most tokens per second, by moving averages. NumPy.

Each batch-size bucket has an average per draft length, zero included, of the tokens a step yields and the seconds it
takes. A step counts with all of its time (drafting, verification, the lost overlap of host and device) and
all of its tokens (few if drafts were not found or were rejected), so costs and acceptance need no model. The fastest
length is used; the others are probed, at most for PROBE_SHARE of the time.

Tokens of a step are the harmonic mean of its rows: a text takes steps by the inverse of its tokens per step, so drafts
that help half of the rows sevenfold shorten the work of all by less than half.

Source: the objective of SmartSpec, Liu et al., arXiv:2406.14066, section 4, with measured seconds and tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np

from ksana_jax.scheduler.step.buckets import Buckets

# Rows, and how many draft tokens of each were accepted.
Accepted: TypeAlias = tuple[np.ndarray, np.ndarray]

# Steps per measurement. One step is too noisy to compare; every one that loses costs up to several plain steps.
BLOCK = 4
# Blocks in a moving average: with 32 steps, chance in accepted tokens is about a tenth of their mean.
RECENT = 8
# Share of the time that probes may lose. Less finds changes of texts later, more slows texts that cannot be drafted.
PROBE_SHARE = 0.01
# A block counts for at most this multiple of its average time, so that one pause of the machine changes no choice.
OUTLIER = 2


@dataclasses.dataclass
class _Average:
    """Moving averages of one draft length.

    seconds: of a step, at most its tokens' time one by one before any was measured. tokens: of a row in a step.
    count: of the blocks in the averages. rest_s: until the length is tried again.
    """

    seconds: float
    tokens: float = 0.0
    count: int = 0
    rest_s: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.count = min(self.count + 1, RECENT)
        self.tokens += (tokens - self.tokens) / self.count
        self.seconds += (min(seconds, OUTLIER * self.seconds) - self.seconds) / self.count

    @property
    def rate(self) -> float:
        """Tokens of a row per second."""
        return self.tokens / self.seconds


class _Bucket:
    """Draft lengths of steps of similarly many rows.

    Args:
      lengths: draft lengths in ascending order, without 0. num_rows: of the engine.
    """

    def __init__(self, lengths: list[int], num_rows: int):
        self._lengths = lengths
        # In this block, tokens [R] accepted of each row; rows of its last step with drafts.
        self._accepted = np.zeros(num_rows)
        self._rows: np.ndarray | slice = slice(0)
        self._averages: dict[int, _Average] = {}
        self.length = self.most = 0
        self.begin(0)

    def begin(self, length: int) -> None:
        """Begins a block of another length, or the next one of the same."""
        self.length, self._steps, self._seconds, self._entry_s = length, 0, 0.0, 0.0
        self._accepted.fill(0)
        self._rows = slice(0)

    def observe(self, seconds: float, accepted: Accepted | None, follows: bool, block: int) -> None:
        """Adds a step of the chosen length; see `Goodput.observe`. follows: the step before was of the same kind."""
        if not follows:  # caches are cold, and a draft model reads the text that it has missed
            self._entry_s = self._entry_s or seconds
            return
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        if accepted is not None:
            self._rows, counts = accepted
            self._accepted[self._rows] += counts
        if self._steps == block:
            self._end()

    def _end(self) -> None:
        """Adds a block to the averages and chooses the length of the next one."""
        length, steps, averages = self.length, self._steps, self._averages
        step_s = max(self._seconds / steps, 1e-9)  # a coarse clock may show zero
        if not averages:
            averages.update({k: _Average((1 + k) * step_s) for k in (0, *self._lengths)})
        average = averages[length] = averages.pop(length)
        is_new = not average.tokens
        tokens = 1 + self._accepted[self._rows] / steps
        average.add(len(tokens) / float((1 / tokens).sum()) if len(tokens) else 1.0, step_s)
        allowed = {k: a for k, a in averages.items() if k <= self.most}
        best = max(allowed, key=lambda k: allowed[k].rate)
        for other in averages.values():
            other.rest_s -= self._seconds
        if best != length:
            # A first entry may compile the programs of a draft model, so it does not predict the next one.
            lost_s = 0.0 if is_new else self._entry_s
            lost_s += average.count * steps * (average.seconds - average.tokens / averages[best].rate)
            for k, other in averages.items():
                if bool(k) == bool(length):
                    other.rest_s = max(other.rest_s, lost_s / PROBE_SHARE)
        else:
            best = next((k for k, other in allowed.items() if k != length and other.rest_s <= 0), length)
            if best != length:
                averages[best].count = 0  # old measurements no longer count
        self.begin(best)


class Goodput:
    """Chooses draft lengths by the measured steps of one engine.

    Args:
      buckets: of the engine's steps.
      steps_per_call: plain steps that share a call of the device; all but one of them seem to take no time.
    """

    def __init__(self, buckets: Buckets, steps_per_call: int = 1):
        self._buckets, self._block = buckets, max(BLOCK, steps_per_call)
        self._states: dict[int, _Bucket] = {}
        self._last: tuple[int, int] | None = None

    def choose(self, num_rows: int, most: int) -> int:
        """Returns how many tokens to draft for each of num_rows rows: 0 to `most`, which is above 0."""
        bucket = self._bucket(self._buckets.num_sampled(num_rows))
        bucket.most = most
        if bucket.length > most:
            bucket.begin(0)
        return bucket.length

    def observe(self, num_rows: int, length: int, seconds: float, accepted: Accepted | None = None) -> None:
        """Records a step of decodes.

        Args:
          length: as chosen, even if no drafts were found. seconds: from the end of the previous step to its own.
          accepted: [n] rows and [n] their accepted draft tokens; None for a step without drafts.
        """
        here = self._buckets.num_sampled(num_rows), length
        follows, self._last = self._last == here, here
        bucket = self._bucket(here[0])
        if bucket.length == length:  # else it was submitted before the choice
            bucket.observe(seconds, accepted, follows, self._block)

    def interrupt(self) -> None:
        """Records a step of another kind, or one that compiled something: the next one is not measured either."""
        self._last = None

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._states:
            lengths = {part.width - 1 for part in self._buckets.verifications if part.count >= size}
            self._states[size] = _Bucket(sorted(lengths), self._buckets.decodes[-1])
        return self._states[size]
