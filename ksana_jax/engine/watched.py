"""Completions that are read token by token: streams, stop strings, log-probabilities. Knows no admission, no blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ksana_jax.core.outputs import CompletionOutput, Logprob
from ksana_jax.core.request import FinishReason, SamplingParams
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.engine.steps import Step
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.step.types import StepOutput, TokenScores
from ksana_jax.tokenizers import Tokenizer

MAX_DISTRIBUTIONS_BYTES = 2**30  # of one request


@dataclasses.dataclass(eq=False)
class WatchedCompletion(Completion):
    """A completion that gets each token as soon as it is sampled.

    Args:
      special_stops: special tokens among the stop strings, by id.
      streams: decode each token as it comes. Otherwise tokens are decoded at the end, unless stop strings need them.
    """

    special_stops: dict[int, str] = dataclasses.field(default_factory=dict)
    streams: bool = False
    _held_back: str = ""
    _distributions: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        super().__post_init__()
        if self.seq.params.logprobs is not None:
            self.logprobs = []
        self._stops = self.seq.params.stop_strings

    def add(self, token: int, scores: TokenScores | None, at: int, *, has_text: bool = True) -> str | None:
        """Adds a new token.

        Args:
          scores: scores of the step's sampled tokens; this token's are at index `at`.
          has_text: False for an id that ends the output.

        Returns:
          The stop string that the token completes, if any.
        """
        self.token_ids.append(token)
        if self.logprobs is not None and scores is not None:
            self.logprobs.append(top_logprobs(scores, at, token, max(self.seq.params.logprobs or 0, 0)))
            if self.seq.params.logprobs == -1:
                self._distributions.append(np.empty(scores.top_ids.shape[1], np.float32))
                self._distributions[-1][scores.top_ids[at]] = scores.top_logprobs[at]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + float(scores.logprob[at])
        included = self.seq.params.include_stop_str_in_output
        if self._detokenizer is None or not (self.streams or self._stops) or not (has_text or included):
            return None
        if not has_text:
            self._release(self._held_back + self._detokenizer.push([token]))
            self._held_back = ""
            return None
        if token in self.special_stops and len(self.token_ids) > self.seq.params.min_tokens:
            stop = self.special_stops[token]
            self._release(self._held_back + self._detokenizer.flush() + stop * included)
            self._held_back, self._detokenizer = "", None
            return stop
        new = self._detokenizer.push([token])
        if self._stops:
            return self._add_text(new)
        self._release(new)
        return None

    def _add_text(self, new: str) -> str | None:
        """Releases text that cannot become part of a stop string; cuts before or after one and returns it."""
        pending, may_end = self._held_back + new, len(self.token_ids) > self.seq.params.min_tokens
        length, kept, stop = search(pending, self._stops if may_end else (), self._stops)
        if stop is not None:
            self._detokenizer = None
            length += len(stop) * self.seq.params.include_stop_str_in_output
        self._release(pending[:length])
        self._held_back = kept
        return stop

    def _output(self, text: str, first: int) -> CompletionOutput:
        output = super()._output(text, first)
        if self.seq.params.logprobs == -1:
            output.distributions = np.array(self._distributions[first:])
        return output

    def _complete(self) -> None:
        if not (self.streams or self._stops):
            self._decode_all()
        elif self._detokenizer is not None:
            self._release(self._held_back + self._detokenizer.flush())
            self._held_back = ""


def add_tokens(
    scheduler: Scheduler, step: Step, output: StepOutput, rows_of: dict[Completion, int]
) -> dict[Request, None]:
    """Adds new tokens to watched completions; returns the requests of those that stream or have ended, in order.

    Args:
      rows_of: row of each completion. A stop string in its text ends it, and drops the rest of its run.
    """
    reported: dict[Request, None] = {}
    batch = step.batch
    place_of = {row: place * step.tile for place, row in enumerate(batch.sampled.tolist())}
    nth_of = {row: nth for nth, row in enumerate(batch.settled.tolist())}
    for completion, row in rows_of.items():
        if (nth := nth_of.get(row)) is None or not isinstance(completion, WatchedCompletion):
            continue
        run = batch.new_tokens_of(nth)
        by_id = completion.seq.finish_reason is FinishReason.STOP
        for at, token in enumerate(run, 1):
            # An id that ends the output has no text.
            stop = completion.add(token, output.scores, place_of[row] + at - 1, has_text=not by_id or at < len(run))
            if stop is not None:
                if batch.num_new is not None:
                    batch.num_new[nth] = at
                _stop_by_text(scheduler, completion, stop)
                reported.setdefault(completion.seq.owner)
                break
        if completion.streams and run:
            reported.setdefault(completion.seq.owner)
    return reported


def _stop_by_text(scheduler: Scheduler, completion: Completion, stop: str) -> None:
    seq = completion.seq
    length = seq.num_prompt + len(completion.token_ids)
    if seq.row is not None:
        scheduler.rows.drop_after(seq.row, length)
        scheduler.finish(seq, FinishReason.STOP, stop)
    else:  # ended by the same token, or by one that comes later in a run of draft tokens
        seq.token_ids = seq.token_ids[:length]
        seq.finish_reason, seq.stop_reason = FinishReason.STOP, stop


def check_distributions(count: int, vocab_size: int) -> None:
    """Checks that the distributions of a request's output tokens can be kept.

    Raises:
      ValueError: they are more than MAX_DISTRIBUTIONS_BYTES.
    """
    if (size := count * vocab_size * 4) > MAX_DISTRIBUTIONS_BYTES:
        raise ValueError(
            f"logprobs is -1: {count:,} distributions of {vocab_size:,} ids are {size:,} bytes, at most "
            f"{MAX_DISTRIBUTIONS_BYTES:,} are kept"
        )


def top_logprobs(scores: TokenScores, at: int, token: int, count: int) -> dict[int, Logprob]:
    """Returns {token: Logprob} of the given token and the `count` most probable ones, at one index of the scores."""
    found = {token: Logprob(float(scores.logprob[at]), int(scores.rank[at]))}
    best = zip(scores.top_ids[at, :count], scores.top_logprobs[at, :count], strict=True)
    for rank, (top, logprob) in enumerate(best):
        found.setdefault(int(top), Logprob(float(logprob), rank + 1))
    return found


def special_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> dict[int, str]:
    """Returns the special tokens among stop strings by id, if the text that is searched leaves special tokens out.

    Raises:
      ValueError: a stop string has a special token and other text, so it would never be found.
    """
    found: dict[int, str] = {}
    if tokenizer is None or not params.skip_special_tokens:
        return found
    for stop in params.stop_strings:
        try:
            ids = tokenizer.encode(stop, add_special_tokens=False)
        except ValueError:  # the vocabulary cannot express it
            continue
        for token in ids:
            piece = tokenizer.piece(token)
            text = piece.data.decode(errors="replace")
            if piece.special and text == stop:
                found[token] = stop
            elif piece.special and text and text in stop:
                raise ValueError(
                    f"stop has {stop!r:.60}, which is never found: the text leaves {text!r:.60} out; give that token "
                    "alone, or skip_special_tokens=False"
                )
    return found


def search(text: str, ending: Sequence[str], stops: Sequence[str]) -> tuple[int, str, str | None]:
    """Searches a text for the first of some stop strings.

    Args:
      ending: those that may end it. stops: all of them, whose beginnings at the end of the text are held back.

    Returns:
      Length of the text before the stop string, or that cannot become part of one; the text to hold back; the stop
      string, or None.
    """
    if found := [(text.find(stop), stop) for stop in ending if stop in text]:
        at, stop = min(found)
        return at, "", stop
    length = len(text) - max((_overlap(text, stop) for stop in stops), default=0)
    return length, text[length:], None


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of text that is a prefix of stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
