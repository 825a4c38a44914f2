"""Beam search over the scheduler's sequences: chooses which beams continue, and how. Knows no blocks, no device.

A beam is a sequence whose tokens are chosen by its request: the scheduler computes them, and the beam then waits until
the request has appended the next one. When all beams of a request have reported, the best continuations are chosen: one
child of each surviving beam takes its place; its other children fork and share its blocks. Copy-on-write does the
rest; the cache is never reordered.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.request import MAX_LOGPROBS, FinishReason
from ksana_jax.scheduler.forking import append, fork
from ksana_jax.scheduler.sequence import Sequence


class Hypothesis(NamedTuple):
    """A finished beam: its score, the sum of its log-probabilities, and the tokens after the prompt."""

    score: float
    logprob: float
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


class Branch(NamedTuple):
    """A continuation of a beam: the next token, and the sum of log-probabilities including it."""

    seq: Sequence
    token: int
    logprob: float


def num_kept(width: int, stop_ids: tuple[int, ...]) -> int:
    """Returns the number of continuations to consider per step: enough for `width` to continue if the rest end."""
    return max(2, 1 + len(stop_ids)) * width


def num_candidates(width: int, stop_ids: tuple[int, ...]) -> int:
    """Returns how many continuations of each beam to consider: num_kept, limited by the available log-probabilities."""
    return min(num_kept(width, stop_ids), MAX_LOGPROBS)


@dataclasses.dataclass(eq=False)
class Beams:
    """The beams of one request.

    Args:
      width: number of beams that continue after each step.
      length_penalty: see `SamplingParams`.
      stop_ids, max_len: as in `Sequence`.

    Attributes:
      alive: sequences and their sums of log-probabilities.
      finished: at most `width` hypotheses, best first.
      num_preemptions: preemptions of beams that have been dropped.
    """

    width: int
    length_penalty: float
    stop_ids: tuple[int, ...]
    max_len: int
    num_prompt: int
    alive: dict[Sequence, float]
    finished: list[Hypothesis] = dataclasses.field(default_factory=list)
    num_preemptions: int = 0
    _reports: dict[Sequence, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)

    @property
    def num_candidates(self) -> int:
        return num_candidates(self.width, self.stop_ids)

    def report(self, seq: Sequence, tokens: np.ndarray, logprobs: np.ndarray) -> bool:
        """Records the num_candidates most probable next tokens of a beam; returns whether it was the last beam."""
        self._reports[seq] = (tokens, logprobs)
        return len(self._reports) == len(self.alive)

    def advance(self, known: dict[Sequence, np.ndarray]) -> list[Branch]:
        """Chooses the continuations; an empty list ends the search.

        Args:
          known: tokens of each beam, prompt included.

        Source: transformers. Among the num_kept best continuations, those that end become finished hypotheses if they
        are among the first `width`, and the first `width` of the rest continue. The search ends when no continuing
        beam scores better, at its current length, than the worst of `width` finished hypotheses.
        """
        found = [
            Branch(seq, int(token), total + float(logprob))
            for seq, total in self.alive.items()
            for token, logprob in zip(*self._reports[seq], strict=True)
        ]
        found.sort(key=lambda branch: -branch.logprob)
        self._reports = {}
        length = len(next(iter(known.values()))) + 1
        chosen: list[Branch] = []
        for rank, branch in enumerate(found[: num_kept(self.width, self.stop_ids)]):
            if branch.token in self.stop_ids:
                if rank < self.width:
                    self._finish(known, branch, FinishReason.STOP)
            elif len(chosen) < self.width:
                chosen.append(branch)
        if length >= self.max_len:
            for branch in chosen:
                self._finish(known, branch, FinishReason.LENGTH)
            return []
        full = len(self.finished) == self.width
        if full and chosen and self._score(chosen[0].logprob, length) <= self.finished[-1].score:
            return []
        return chosen

    def _score(self, logprob: float, length: int) -> float:
        return logprob / (length - self.num_prompt) ** self.length_penalty

    def _finish(self, known: dict[Sequence, np.ndarray], branch: Branch, reason: FinishReason) -> None:
        ids = known[branch.seq]
        score = self._score(branch.logprob, len(ids) + 1)
        token_ids = [*ids[self.num_prompt :].tolist(), branch.token]
        stop = branch.token if reason is FinishReason.STOP else None
        self.finished.append(Hypothesis(score, branch.logprob, token_ids, reason, stop))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]


def advance(beams: Beams, scheduler: Any, new_sequence: Any) -> bool:
    """Advances a search whose beams have all reported; returns whether it continues.

    Args:
      new_sequence: (token_ids) -> a Sequence that is a beam of this request.
    """
    rows = scheduler.rows
    known = {s: s.token_ids if s.row is None else rows.token_ids[s.row, : rows.num_tokens[s.row]] for s in beams.alive}
    branches = beams.advance(known)
    known = {seq: ids.copy() for seq, ids in known.items()}
    alive: dict[Sequence, float] = {}
    in_place: list[Branch] = []
    for branch in branches:
        if all(branch.seq is not other.seq for other in in_place):
            in_place.append(branch)
            continue
        child = new_sequence(np.append(known[branch.seq], np.int32(branch.token)))
        fork(scheduler.queue, scheduler.row_blocks, scheduler.eviction, scheduler.states, branch.seq, child)
        alive[child] = branch.logprob
    for branch in in_place:
        append(scheduler.rows, branch.seq, branch.token)
        alive[branch.seq] = branch.logprob
    for seq in beams.alive:
        if seq not in alive:
            beams.num_preemptions += seq.num_preemptions
            scheduler.finish(seq, FinishReason.ABORT)
    beams.alive = alive
    return bool(branches)
