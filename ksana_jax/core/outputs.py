"""Outputs of requests, as users see them, and their metrics."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from ksana_jax.core.prefix_report import PrefixReport
from ksana_jax.core.request import FinishReason

if TYPE_CHECKING:
    import numpy as np


class Logprob(NamedTuple):
    """A token's log-probability, and its rank: 1 for the most probable."""

    logprob: float
    rank: int


@dataclasses.dataclass
class CompletionOutput:
    """One completion of a request.

    logprobs: for each token {token_id: Logprob} of the chosen and the top tokens, if requested.
    distributions: [tokens, V] float32 log-probabilities of the whole vocabulary, if logprobs is -1; None otherwise.
    cumulative_logprob: sum over the tokens, for beams and if log-probabilities were requested; None otherwise.
    error: why it ended, if finish_reason is "error".
    kept_tokens: bool [L, K, tokens], those to which the last computed token attends, of prompt and output without the
    last sampled one; with `EngineConfig.kept_tokens`. None for beams, and before the end unless it is streamed.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    distributions: np.ndarray | None = dataclasses.field(default=None, compare=False)
    kept_tokens: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestMetrics:
    """Times of a request in seconds on the engine's clock; None for events that have not happened.

    scheduled_s: the first step that computes some of it begins. queue_s: from arrival to that. ttft_s: from
    arrival to the first token. tpot_s: mean time per later token of the longest completion.
    num_output_tokens: tokens of all completions. num_preemptions: number of preemptions. num_cached_tokens: prompt
    tokens taken from the prefix cache. num_blocks_by_origin: KV blocks that its rows obtained, {"computed": 3, ...},
    see `kv.state.Origin`; blocks computed by a running row are added when it leaves. num_drafts, num_draft_tokens,
    num_accepted_tokens: drafts of its rows, their tokens, and those accepted; added when a row leaves.
    prefix_report: see `RequestOutput`. num_cached_keys, num_cached_states: with recurrent layers, prompt tokens whose
    keys and values were in the prefix cache, and prompt tokens up to its last state; None without.
    """

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    scheduled_s: float | None = None
    num_output_tokens: int = 0
    longest_output: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_blocks_by_origin: dict[str, int] = dataclasses.field(default_factory=dict)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefix_report: PrefixReport | None = None
    num_cached_keys: int | None = None
    num_cached_states: int | None = None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a verified draft has yielded, the model's own one included; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_s is None or self.finished_s is None or self.longest_output < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.longest_output - 1)


@dataclasses.dataclass
class RequestOutput:
    """The output of a request so far.

    prompt_logprobs: if requested, None for the first prompt token, which nothing predicts, then {token_id: Logprob}.
    num_cached_tokens: prompt tokens taken from the prefix cache; `metrics` has how far keys and states reach in it.
    cache_salt, num_question: of the request, see `RequestInput`.
    pooled: [D] float32, hidden states of the prompt, if requested; see `PoolingParams`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    cache_salt: str = ""
    num_question: int = 0
    pooled: np.ndarray | None = None

    @property
    def prefix_report(self) -> PrefixReport | None:
        """Why no more of the prompt was reused; None before its first token or without `prefix_report_blocks`."""
        return self.metrics.prefix_report

    def check(self) -> RequestOutput:
        """Checks for errors; returns the output itself.

        Raises:
          FloatingPointError: a completion ended with an error, because its scores were not finite.
        """
        for output in self.outputs:
            if output.error is not None:
                raise FloatingPointError(f"{self.request_id}: {output.error}")
        return self
