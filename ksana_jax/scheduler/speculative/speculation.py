"""Speculative decoding of one engine: asks the proposer, checks its drafts, counts accepted tokens. No jax."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
from ksana_jax.scheduler.speculative.draft_length import Goodput
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.types import StepShape
from ksana_jax.scheduler.step.verification import most_drafts

T = TypeVar("T")
logger = logging.getLogger("ksana_jax")


@dataclasses.dataclass
class SpeculationCounts:
    """Counts of speculation since the engine was built.

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


class Speculation:
    """Drafts for a scheduler.

    Args:
      proposer: its failures cost its drafts and nothing else.
      context: the engine that it serves.
    """

    def __init__(self, method: SpeculativeMethod, proposer: Proposer, context: ProposerContext):
        self.method, self.proposer = method, proposer
        self.vocab_size, self.buckets = context.vocab_size, context.buckets
        self.counts = SpeculationCounts(np.zeros(method.num_speculative_tokens, np.int64))
        self.goodput = None
        if method.adaptive == "goodput":
            self.goodput = Goodput(context.buckets, context.config.num_scheduler_steps)
        # When the last step ended, 0 if no sequence has run since; and the number of sequences in rows.
        self._last_end_s, self._num_running = 0.0, 0
        # Draft length for which the proposer was asked since the last step ended, 0 if it was not.
        self._length = 0
        # Draft length and seconds of the last step; None if its time is not comparable with others.
        self._step_s: tuple[int, float] | None = None
        # For each row's sequence: drafts, their tokens, accepted ones.
        self._of_rows = np.zeros((context.config.max_num_seqs, 3), np.int64)

    def most_at(self, rows: np.ndarray) -> int:
        """Returns the maximum draft tokens of a row in a step of decodes of rows [n]; 0 if it has no drafts."""
        most = min(self.method.most_at(len(rows)), most_drafts(self.buckets, len(rows)))
        return self.goodput.choose(len(rows), most) if most and len(rows) and self.goodput is not None else most

    def may_draft(self, rows: Rows, which: np.ndarray) -> bool:
        """Returns True if the next step of rows [n] may have drafts, and so needs the tokens of the running one."""
        return self.most_at(which) > 0 and (bool(rows.settings.matchers) or not self.proposer.needs_grammars)

    @property
    def needs_blocks(self) -> bool:
        """True if rows must have the blocks of their draft tokens before they are drafted."""
        return self.proposer.needs_blocks

    def begin(self, rows: Rows, entered: Iterable[int]) -> None:
        """Registers the sequences that have entered some rows."""
        for row in entered:
            seq = rows.seqs[row]
            assert seq is not None
            self._num_running += 1
            self._asked(functools.partial(self.proposer.begin, row, seq.token_ids, seq.num_prompt, seq.kv.salt))

    def end(self, row: int, seq: Sequence) -> None:
        """Unregisters a sequence that has left its row."""
        drafts, tokens, accepted = (self._of_rows[row] + seq.drafts).tolist()
        seq.drafts, self._of_rows[row] = (drafts, tokens, accepted), 0
        self._asked(functools.partial(self.proposer.end, row, seq.token_ids, seq.finish_reason is not None))
        self._num_running -= 1
        if not self._num_running:
            self._last_end_s = 0.0

    def end_all(self, rows: Rows) -> None:
        """Unregisters all sequences, after a failure."""
        for row, seq in enumerate(rows.seqs):
            if seq is not None:
                self.end(row, seq)

    def keep_up(self, rows: Rows, which: np.ndarray) -> None:
        """Passes on the tokens that rows [n] have computed; see `Proposer.keep_up`."""
        began = time.perf_counter()
        texts = Texts(rows.token_ids, rows.num_tokens, rows)
        self._asked(functools.partial(self.proposer.keep_up, texts, which))
        self.counts.proposer_s += time.perf_counter() - began

    def draft(self, rows: Rows, decodes: np.ndarray, most: np.ndarray) -> Drafts | None:
        """Returns drafts for decodes [n], at most `most` [n] tokens of each; None without any."""
        self._length = self.most_at(decodes)
        texts, began = Texts(rows.token_ids, rows.num_tokens, rows), time.perf_counter()
        drafts = self._asked(lambda: self._checked(self.proposer.propose(texts, decodes, most), most))
        self.counts.proposer_s += time.perf_counter() - began
        return drafts if drafts is not None and np.count_nonzero(drafts.counts) else None

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

    def observe_step(self, shape: StepShape | None, began_s: float, ended_s: float) -> None:
        """Records the times of a step.

        Args:
          shape: None if its time is not comparable: it has chunks of prompts, or something was compiled.
          began_s: when the host began to schedule it. ended_s: when its tokens arrived.
        """
        # The host's work since the previous step belongs to this one, unless no sequence was running.
        since, self._last_end_s = self._last_end_s or began_s, ended_s
        length, self._length = self._length, 0
        self._step_s = None if shape is None else (length, ended_s - since)
        if self.goodput is None:
            return
        if shape is None:
            self.goodput.interrupt()
        elif shape.parts[0].width == 1:
            self.goodput.observe(shape.parts[0].count, length, ended_s - since)

    def settle(self, rows: np.ndarray, drafts: Drafts, num_accepted: np.ndarray) -> None:
        """Counts accepted and rejected drafts of rows [n]; num_accepted: [n] their accepted tokens."""
        counts, drafted = self.counts, drafts.counts
        self._asked(functools.partial(self.proposer.observe, rows, drafts))
        if self.goodput is not None and self._step_s is not None:
            self.goodput.observe(len(rows), *self._step_s, (rows, num_accepted))
        self._of_rows[rows] += np.stack([drafted > 0, drafted, num_accepted], axis=1)
        counts.num_drafts += int(np.count_nonzero(drafted))
        counts.num_draft_tokens += int(drafted.sum())
        counts.num_accepted_tokens += int(num_accepted.sum())
        longest = int(num_accepted.max(initial=0))
        counts.accepted_per_pos[:longest] += (num_accepted[:, None] > np.arange(longest)).sum(axis=0)
