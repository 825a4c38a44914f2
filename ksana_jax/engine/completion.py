"""Requests and their completions, of which callers get outputs and deltas. Knows no scheduling."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ksana_jax.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from ksana_jax.core.request import FinishReason, SamplingParams
from ksana_jax.engine.beam import Beams
from ksana_jax.scheduler.sequence import Sequence
from ksana_jax.tokenizers import IncrementalDetokenizer, Tokenizer

NO_TOKEN = "the scores of the next token are not finite: NaN or infinity in weights, KV cache or adjusted scores"


@dataclasses.dataclass(eq=False)
class Completion:
    """The output so far of one sequence of a request; tokens and text come when it ends.

    Args:
      index: in [0, n).
      tokenizer: decodes tokens; None leaves the text empty.
    """

    index: int
    seq: Sequence
    tokenizer: Tokenizer | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    kept_tokens: np.ndarray | None = None
    _closed: bool = False
    _num_taken: int = 0

    def __post_init__(self):
        self._pieces: list[str] = []  # all text
        self._new: list[str] = []  # text since the last delta
        self._detokenizer = None
        if self.tokenizer:
            # Detokenizes after the prompt, so that the first word keeps its space.
            self._detokenizer = IncrementalDetokenizer(
                self.tokenizer, self.seq.params.skip_special_tokens, context=self.seq.token_ids.tolist()
            )

    @property
    def text(self) -> str:
        """The text so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _release(self, text: str) -> None:
        self._pieces.append(text)
        self._new.append(text)

    def close(self) -> None:
        """Completes tokens and text once the sequence has ended."""
        if not self._closed:
            self._closed = True
            if self.seq.finish_reason is FinishReason.ERROR:
                matcher = self.seq.matcher
                broken = None if matcher is None else matcher.error
                self.error = NO_TOKEN if broken is None else f"structured_outputs: {broken}"
            self._complete()

    def _complete(self) -> None:
        self.token_ids = self.seq.token_ids[self.seq.num_prompt :].tolist()
        self._decode_all()

    def _decode_all(self) -> None:
        """Turns all tokens into text, the stop token only if asked."""
        if self._detokenizer is not None:
            by_id = self.seq.finish_reason is FinishReason.STOP
            hidden = by_id and not self.seq.params.include_stop_str_in_output
            self._release(self._detokenizer.push(self.token_ids[:-1] if hidden else self.token_ids))
            self._release(self._detokenizer.flush())

    def fail(self, error: str) -> None:
        """Ends the completion with an error; its text stays as it is."""
        self.seq.finish_reason, self.seq.stop_reason, self.error = FinishReason.ERROR, None, error
        self._closed = True

    def output(self) -> CompletionOutput:
        """Returns all that there is so far."""
        return self._output(self.text, 0)

    def take_delta(self) -> CompletionOutput:
        """Returns the delta since the last call, in time proportional to it."""
        text, self._new = "".join(self._new), []
        first, self._num_taken = self._num_taken, len(self.token_ids)
        return self._output(text, first)

    def _output(self, text: str, first: int) -> CompletionOutput:
        seq = self.seq
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[first:],
            None if self.logprobs is None else self.logprobs[first:],
            seq.finish_reason,
            seq.stop_reason,
            self.cumulative_logprob,
            self.error,
            kept_tokens=self.kept_tokens,
        )


@dataclasses.dataclass(eq=False)
class Request:
    """A request in the engine, with its prompt and n completions.

    Attributes:
      news: queue that receives the request whenever it has something new to report; None without such a reader.
      failure: the error that ended the request, if not its own fault.
      adapter: as its sequences have it, see `Sequence`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: np.ndarray
    params: SamplingParams
    metrics: RequestMetrics
    completions: list[Completion] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: np.ndarray | None = None
    beams: Beams | None = None
    news: dict[Request, None] | None = None
    failure: BaseException | None = None
    adapter: Any = None
    _num_scores_taken: int = 0

    def notify(self) -> None:
        """Puts the request into `news`, if it is set."""
        if self.news is not None:
            self.news[self] = None

    def fail(self, failure: BaseException) -> None:
        """Ends all completions with an error."""
        self.failure = failure
        for completion in self.completions:
            completion.fail(f"{type(failure).__name__}: {failure}")
        self.notify()

    def checked(self) -> Request:
        """Returns the request itself.

        Raises:
          RuntimeError: an error that was not its own fault has ended it.
        """
        if self.failure is None:
            return self
        raise RuntimeError(
            f"the request was ended by a failure in another request's step: {self.completions[0].error}"
        ) from self.failure

    def close(self, now: float) -> None:
        """Completes texts and metrics once all completions have ended."""
        metrics = self.metrics
        metrics.finished_s = now
        for completion in self.completions:
            completion.close()
        lengths = [len(c.seq.token_ids) - c.seq.num_prompt for c in self.completions]
        metrics.num_output_tokens, metrics.longest_output = sum(lengths), max(lengths)
        metrics.num_preemptions = sum(seq.num_preemptions for seq in self.sequences)
        metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens = (
            sum(seq.drafts[i] for seq in self.sequences) for i in range(3)
        )
        if self.beams is not None:
            metrics.num_preemptions += self.beams.num_preemptions

    @property
    def sequences(self) -> list[Sequence]:
        """Returns its running sequences: one per completion, or its beams."""
        return [c.seq for c in self.completions] if self.beams is None else list(self.beams.alive)

    @property
    def finished(self) -> bool:
        for completion in self.completions:  # `all` would take three times as long, several times a token
            if completion.seq.finish_reason is None:
                return False
        return True

    def output(self) -> RequestOutput:
        """Returns all that there is so far."""
        metrics = dataclasses.replace(self.metrics, num_blocks_by_origin=dict(self.metrics.num_blocks_by_origin))
        return self._output(self.prompt_token_ids.tolist(), metrics, [c.output() for c in self.completions], 0)

    def take_delta(self) -> RequestOutput:
        """Returns the delta since the last call, in time proportional to it; deltas share prompt ids and metrics."""
        first, self._num_scores_taken = self._num_scores_taken, len(self.prompt_logprobs or ())
        return self._output(self._prompt_ids, self.metrics, [c.take_delta() for c in self.completions], first)

    @functools.cached_property
    def _prompt_ids(self) -> list[int]:
        return self.prompt_token_ids.tolist()

    def _output(
        self, prompt_ids: list[int], metrics: RequestMetrics, completions: list[CompletionOutput], first: int
    ) -> RequestOutput:
        seq = self.completions[0].seq
        return RequestOutput(
            self.request_id,
            self.prompt,
            prompt_ids,
            completions,
            self.finished,
            metrics,
            None if self.prompt_logprobs is None else self.prompt_logprobs[first:],
            self.metrics.num_cached_tokens,
            seq.kv.salt,
            seq.num_question,
            self.pooled,
        )
