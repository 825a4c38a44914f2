"""Speculative decoding of one engine: asks the proposer, checks what it says, counts what was accepted. No jax."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from ksana_jax.sequence import Rows, Sequence
from ksana_jax.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
from ksana_jax.speculative.goodput import Goodput
from ksana_jax.speculative.watch import Watch
from ksana_jax.step.contract import StepShape
from ksana_jax.step.drafts import Drafts

T = TypeVar("T")
logger = logging.getLogger("ksana_jax")


@dataclasses.dataclass
class SpeculationCounts:
    """What speculation has done since the engine was built.

    num_drafts: drafts that were verified, of one row in one step each. num_draft_tokens, num_accepted_tokens: their
      tokens. accepted_per_pos: [K] accepted tokens by their place in the draft. proposer_s: seconds of the host.
    num_failures: calls of the proposer that failed.
    """

    accepted_per_pos: np.ndarray
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    proposer_s: float = 0.0
    num_failures: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens per draft token; None before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a verified draft yields, the model's own one included; None before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


class Speculation:
    """Drafts for a scheduler.

    Args:
      proposer: whose failures cost its drafts and nothing else.
      context: the engine that it drafts for.
    """

    def __init__(self, method: SpeculativeMethod, proposer: Proposer, context: ProposerContext):
        self.method, self.proposer = method, proposer
        self.vocab_size, self.buckets = context.vocab_size, context.buckets
        self.counts = SpeculationCounts(np.zeros(method.num_speculative_tokens, np.int64))
        self.goodput = None
        if method.adaptive == "goodput":
            config = context.config
            watches = proposer.reads_texts_alone
            self.goodput = Goodput(context.buckets, config.max_num_seqs, config.num_scheduler_steps, watches)
        self._watch = Watch(context.config.max_num_seqs, method.num_speculative_tokens)
        # When the last step ended, 0 if there was no text since; and the texts that have rows.
        self._last_end_s, self._num_texts = 0.0, 0
        # Steps that goodput does not look at, as long as they have as many rows as the last one that it looked at.
        self._unseen, self._num_running = 0, 0
        # Of those: seconds, and in which the host waited.
        self._passed: list[tuple[float, float]] = []
        # Of each row's sequence: drafts, their tokens, accepted ones.
        self._of_rows = np.zeros((context.config.max_num_seqs, 3), np.int64)

    def most_at(self, rows: np.ndarray) -> int:
        """Returns the most draft tokens of a row in a step of decodes of rows [n]; 0 if it has no drafts."""
        if self._unseen and len(rows) == self._num_running:
            return 0
        most = min(self.method.most_at(len(rows)), self.buckets.most_drafts(len(rows)))
        if most and len(rows) and self.goodput is not None and self.goodput.rests(rows, most):
            return 0
        return most

    @property
    def needs_blocks(self) -> bool:
        """Whether rows must have the blocks of their draft tokens before they are drafted."""
        return self.proposer.needs_blocks

    def begin(self, rows: Rows, entered: Iterable[int]) -> None:
        """Takes note of the sequences that have entered some rows."""
        for row in entered:
            seq = rows.seqs[row]
            assert seq is not None
            self._num_texts += 1
            if self.goodput is not None and self.goodput.begin(row):
                self._unseen = 0
            self._asked(functools.partial(self.proposer.begin, row, seq.token_ids, seq.num_prompt, seq.kv.salt))

    def end(self, row: int, seq: Sequence) -> None:
        """Takes note that a sequence has left its row."""
        drafts, tokens, accepted = (self._of_rows[row] + seq.drafts).tolist()
        seq.drafts, self._of_rows[row] = (drafts, tokens, accepted), 0
        self._asked(functools.partial(self.proposer.end, row, seq.token_ids, seq.finish_reason is not None))
        self._watch.end(row)
        self._num_texts -= 1
        if not self._num_texts:
            self._last_end_s = 0.0

    def end_all(self, rows: Rows) -> None:
        """Takes note that all sequences have left their rows, after a failure."""
        for row, seq in enumerate(rows.seqs):
            if seq is not None:
                self.end(row, seq)

    def keep_up(self, rows: Rows, which: np.ndarray) -> None:
        """Takes note of what rows [n] have computed; see `Proposer.keep_up`."""
        began = time.perf_counter()
        texts = Texts(rows.token_ids, rows.num_tokens, rows)
        self._asked(functools.partial(self.proposer.keep_up, texts, which))
        self.counts.proposer_s += time.perf_counter() - began

    def draft(self, rows: Rows, decodes: np.ndarray, most: np.ndarray, queued: bool) -> Drafts | None:
        """Returns drafts for decodes [n], at most `most` [n] tokens of each; None if there are none. queued: whether
        others wait for rows."""
        offer = None
        self._tell_left(rows, queued)
        if self.goodput is not None and (offer := self.goodput.asks(decodes, most)) is None:
            return None
        began = time.perf_counter()
        drafts = self._proposed(Texts(rows.token_ids, rows.num_tokens, rows), decodes, most)
        seconds = time.perf_counter() - began
        self.counts.proposer_s += seconds
        if self.goodput is not None and offer is not None:
            self.goodput.observe_proposal(len(decodes), seconds)
            length = self.goodput.choose(offer, decodes, drafts)
            drafts = drafts.shortened(np.full(len(decodes), length)) if drafts is not None and length else None
        return drafts if drafts is not None and np.count_nonzero(drafts.counts) else None

    def _proposed(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts | None:
        return self._asked(lambda: self._checked(self.proposer.propose(texts, rows, most), most))

    def _tell_left(self, rows: Rows, queued: bool) -> None:
        if self.goodput is not None:
            self.goodput.left = None if queued else rows.max_len - rows.num_known

    def watch(self, rows: Rows, running: np.ndarray, queued: bool) -> None:
        """Compares drafts that no step verifies with the texts of running rows [n], where goodput wants to know.
        queued: whether others wait for rows."""
        if self._unseen or self.goodput is None or not len(running) or rows.num_beams:
            return
        self._tell_left(rows, queued)
        if len(some := self.goodput.to_watch(running)):
            self._watch_some(self.goodput, rows, running, some)
        self._num_running = len(running)

    def _watch_some(self, goodput: Goodput, rows: Rows, running: np.ndarray, some: np.ndarray) -> None:
        began = time.perf_counter()
        for outcome in self._watch.judged(rows.token_ids, rows.num_known):
            goodput.outcomes.observe_judged(*outcome)
        num_watched, most = len(some), self.method.most_at(len(running))
        some = some[rows.num_known[some] > rows.num_prompt[some]]
        left = np.minimum(rows.max_len[some] - rows.num_known[some], most)
        some, left = some[left > 0], left[left > 0]
        if len(some):
            drafts = self._proposed(Texts(rows.token_ids, rows.num_known, rows), some, left)
            if drafts is not None:
                goodput.outcomes.observe_found(some, drafts.lengths(left.max(keepdims=True))[0])
                self._watch.add(some, rows.num_known[some], drafts)
        self.counts.proposer_s += time.perf_counter() - began
        goodput.watched(running, most)
        goodput.observe_watch(num_watched, time.perf_counter() - began)

    def _checked(self, drafts: Drafts, most: np.ndarray) -> Drafts:
        ids, counts = np.asarray(drafts.ids, np.int32), np.asarray(drafts.counts, np.int32)
        if counts.shape != most.shape or ids.ndim != 2 or len(ids) != len(most):
            raise ValueError(f"drafts have the shapes {ids.shape} and {counts.shape} for {len(most)} rows")
        if np.count_nonzero((counts < 0) | (counts > most) | (counts > ids.shape[1])):
            raise ValueError(f"a row has {int(counts.max())} draft tokens, {int(most.max())} were asked for")
        used = np.arange(ids.shape[1]) < counts[:, None]
        if np.count_nonzero(used & ((ids < 0) | (ids >= self.vocab_size))):
            raise ValueError(f"a draft token is not in the vocabulary of {self.vocab_size:,} ids")
        checked = drafts._replace(ids=ids, counts=counts)
        if drafts.parents is not None:
            return self._with_parents(checked, np.asarray(drafts.parents, np.int32), used)
        return checked

    def _with_parents(self, drafts: Drafts, parents: np.ndarray, used: np.ndarray) -> Drafts:
        if parents.shape != drafts.ids.shape:
            raise ValueError(f"drafts have the shapes {drafts.ids.shape} of ids and {parents.shape} of parents")
        if np.count_nonzero(used & ((parents < -1) | (parents >= np.arange(drafts.ids.shape[1])))):
            raise ValueError("a draft token follows one that does not come before it")
        drafts = drafts._replace(parents=parents)
        if not drafts.branches:
            return drafts._replace(parents=None)
        if not self.method.draws_trees:
            raise ValueError(f"{type(self.method).__name__} drafts branches, and does not say so: see draws_trees")
        return drafts

    def _asked(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except Exception as error:  # whatever a user's proposer may raise
            if not self.counts.num_failures:
                logger.warning(
                    "speculative_config: the proposer failed, its drafts are lost: %s: %s", type(error).__name__, error
                )
            self.counts.num_failures += 1
            return None

    def observe_step(self, shape: StepShape | None, began_s: float, waits_from_s: float, ended_s: float) -> None:
        """Takes note of the times of a step.

        Args:
          shape: None of a step whose time says nothing of others: it has chunks of prompts, or something was compiled.
          began_s: when the host began to schedule it. waits_from_s, ended_s: when it began to wait for the tokens, and
            when they arrived.
        """
        # What the host has done since the step before belongs to this one, unless there were no texts.
        since, self._last_end_s = self._last_end_s or began_s, ended_s
        if self.goodput is None:
            return
        part = None if shape is None else shape.parts[0]
        if part is None and self._unseen:  # a prompt in a rest, which goes on after it
            self._passed.clear()
            return
        if part != self.goodput.last:
            self._unseen = 0
            self._passed.clear()
        self._passed.append((ended_s - since, ended_s - waits_from_s))
        if self._unseen:
            self._unseen -= 1
            return
        # Single steps of half a millisecond vary by half of it.
        seconds, waited_s = (sum(each) / len(self._passed) for each in zip(*self._passed, strict=True))
        self._passed.clear()
        self.goodput.observe_step(part, seconds, waited_s)
        self._unseen = self.goodput.unseen(self._num_running) if part is not None and part.width == 1 else 0

    def settle(self, rows: np.ndarray, drafts: Drafts, num_accepted: np.ndarray) -> None:
        """Counts what became of the drafts of rows [n]; num_accepted: [n] their accepted tokens."""
        counts, drafted = self.counts, drafts.counts
        self._asked(functools.partial(self.proposer.observe, rows, drafts))
        if self.goodput is not None:
            [lengths] = drafts.lengths(np.array([self.method.num_speculative_tokens]))
            self.goodput.observe_drafts(rows, lengths, num_accepted)
        self._of_rows[rows] += np.stack([drafted > 0, drafted, num_accepted], axis=1)
        counts.num_drafts += int(np.count_nonzero(drafted))
        counts.num_draft_tokens += int(drafted.sum())
        counts.num_accepted_tokens += int(num_accepted.sum())
        longest = int(num_accepted.max(initial=0))
        counts.accepted_per_pos[:longest] += (num_accepted[:, None] > np.arange(longest)).sum(axis=0)
