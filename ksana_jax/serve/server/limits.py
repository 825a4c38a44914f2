"""Limits of the queue before the engine: requests beyond them are refused with the time after which to try again."""

from __future__ import annotations

import math

from ksana_jax.core import checks
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine_thread import StepNews

# Defaults: sequences per row of the engine, and at least; seconds that it takes to compute the queued prompts. They let
# in a benchmark that sends a few hundred requests at once. OpenAI's client waits 600 s for an answer.
SEQUENCES_PER_ROW, MIN_SEQUENCES = 4, 1024
QUEUED_PREFILL_S = 600.0
# Steps with prefills before their rate is known, and steps after which an old one weighs 1/e of a new one.
_MIN_STEPS = 8
_MEMORY_STEPS = 50


class QueueFull(RuntimeError):
    """The queue has no room for a request; the message gives the numbers.

    retry_after_s: seconds after which the prompts queued now are computed, at least 1.
    """

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PrefillRate:
    """Measures the prompt tokens that one engine computes per second of the steps that compute any."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._num_steps = 0
        self._ended_s = -math.inf

    def observe(self, news: StepNews) -> None:
        """Adds the steps of an engine, one after the other."""
        for record in news.records:
            # The device computes a step from its submission or the end of the step before it.
            seconds, self._ended_s = record.ended_s - max(record.began_s, self._ended_s), record.ended_s
            tokens = record.num_chunk_tokens
            if tokens <= 0 or seconds <= 0 or record.compiled:
                continue
            keep = 1 - 1 / _MEMORY_STEPS
            self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds
            self._num_steps += 1

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None until it is known."""
        return self._tokens / self._seconds if self._num_steps >= _MIN_STEPS else None


class QueueLimits:
    """Refuses requests while too many wait or run; installs itself as the `admission` of an AsyncLLM.

    AsyncLLM calls it on the event loop right before it queues a request, with no other task in between: requests that
    arrive together cannot pass a limit together.

    Args:
      max_num_queued_reqs: sequences that wait and run, n for a request with n completions; None takes 4 for each of the
        engines' max_num_seqs, and at least 1024.
      max_num_queued_tokens: prompt tokens of requests without a first token. None takes the engines' measured work of
        600 s; until then there is no limit.

    A single request that exceeds a limit is accepted when no other is open.

    Raises:
      ValueError: a limit is not a positive integer.
    """

    def __init__(
        self, llm: AsyncLLM, *, max_num_queued_reqs: int | None = None, max_num_queued_tokens: int | None = None
    ):
        given = {"max_num_queued_reqs": max_num_queued_reqs, "max_num_queued_tokens": max_num_queued_tokens}
        checks.require(*(checks.integer(name, n, 1, 2**31 - 1, optional=True) for name, n in given.items()))
        num_replicas = len(llm.replicas.replicas)
        rows = llm.config.max_num_seqs * num_replicas
        self._llm = llm
        self.max_num_queued_reqs = max_num_queued_reqs or max(SEQUENCES_PER_ROW * rows, MIN_SEQUENCES)
        self._max_num_queued_tokens = max_num_queued_tokens
        self._rates = [PrefillRate() for _ in range(num_replicas)]
        llm.admission = self.admit
        llm.observers.append(self._observe)

    def _observe(self, news: StepNews) -> None:
        self._rates[news.replica].observe(news)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that all replicas compute per second, as measured; None until it is known."""
        known = [rate.tokens_per_s for rate in self._rates if rate.tokens_per_s is not None]
        return sum(known) / len(known) * len(self._rates) if known else None

    @property
    def max_num_queued_tokens(self) -> int | None:
        """The limit in force; None while there is none."""
        if self._max_num_queued_tokens is not None:
            return self._max_num_queued_tokens
        rate = self.prefill_tokens_per_s
        return None if rate is None else math.ceil(QUEUED_PREFILL_S * rate)

    @property
    def retry_after_s(self) -> int:
        """Seconds until the prompts queued now are computed, rounded up; 1 while the rate is unknown."""
        rate = self.prefill_tokens_per_s
        return 1 if rate is None else max(math.ceil(self._llm.stats().num_prefill_tokens / rate), 1)

    def admit(self, num_sequences: int, num_tokens: int) -> None:
        """Checks that the queue has room for requests.

        Args:
          num_sequences: their completions. num_tokens: of their prompts.

        Raises:
          QueueFull: it has not.
        """
        stats = self._llm.stats()
        queued, most = stats.num_sequences, self.max_num_queued_reqs
        if queued and queued + num_sequences > most:
            raise QueueFull(
                f"the queue is full: {queued:,} sequences wait or run, {num_sequences:,} more make "
                f"{queued + num_sequences:,}, max_num_queued_reqs is {most:,}",
                self.retry_after_s,
            )
        tokens, most_tokens = stats.num_prefill_tokens, self.max_num_queued_tokens
        if most_tokens is not None and tokens and tokens + num_tokens > most_tokens:
            raise QueueFull(
                f"the queue is full: {tokens:,} prompt tokens wait, {num_tokens:,} more make "
                f"{tokens + num_tokens:,}, max_num_queued_tokens is {most_tokens:,}",
                self.retry_after_s,
            )
