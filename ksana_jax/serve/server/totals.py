"""Adds up what the steps of one engine have brought, for metrics. Knows no format."""

from __future__ import annotations

import collections

from ksana_jax.core.metrics import StepRecord
from ksana_jax.core.outputs import RequestMetrics, RequestOutput
from ksana_jax.engine.engine_thread import StepNews
from ksana_jax.serve.server.histogram import FIRST_TOKEN_S, REQUEST_S, STEP_TOKENS, TOKEN_S, Histogram, one_two_five


class Totals:
    """Counts and histograms of one engine since this object's creation; `observe` takes microseconds per step.

    Attributes:
      num_prompt_tokens: of requests that have their first token. num_cached_tokens: those from the prefix cache.
      num_generated_tokens: of all completions but beams.
      num_ended: requests' completions by finish reason. num_failed_steps: steps that have ended all their requests.
      num_steps: by kind: "prefill" computes no other rows than prompts' chunks, "decode" one token of each row.
      histograms: by the metric's name, without a prefix.
    """

    def __init__(self, max_model_len: int):
        lengths = one_two_five(max_model_len)
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = self.num_failed_steps = 0
        self.num_ended: collections.Counter[str] = collections.Counter()
        self.num_steps: collections.Counter[str] = collections.Counter()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN_S),
            "inter_token_latency_seconds": Histogram(TOKEN_S),
            "request_time_per_output_token_seconds": Histogram(TOKEN_S),
            "e2e_request_latency_seconds": Histogram(REQUEST_S),
            "request_queue_time_seconds": Histogram(REQUEST_S),
            "request_prefill_time_seconds": Histogram(REQUEST_S),
            "request_decode_time_seconds": Histogram(REQUEST_S),
            "request_inference_time_seconds": Histogram(REQUEST_S),
            "request_prompt_tokens": Histogram(lengths),
            "request_prefill_kv_computed_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_params_n": Histogram((1, 2, 5, 10, 20)),
            "request_params_max_tokens": Histogram(lengths),
            "iteration_tokens_total": Histogram(STEP_TOKENS),
        }
        self._last: StepRecord | None = None

    def observe(self, news: StepNews) -> None:
        """Adds the news of a step."""
        found = self.histograms
        for request in news.first_tokens:
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.metrics.num_cached_tokens
            found["time_to_first_token_seconds"].observe(request.metrics.ttft_s)
            found["request_params_n"].observe(request.params.n)
            found["request_params_max_tokens"].observe(request.params.max_tokens)
        num_first = len(news.first_tokens)
        for record in news.records:
            num_first = self._add_step(record, num_first)
        for output in news.outputs:
            if output.finished:
                self._add_ended(output, output.metrics)
        self.num_failed_steps += news.failure is not None

    def _add_step(self, record: StepRecord, num_first: int) -> int:
        """Adds a step. num_first: requests' first tokens in this and later steps; returns how many of
        these are left."""
        first = min(record.num_new_tokens, num_first)
        chunks = record.num_chunk_tokens
        self.num_steps["mixed" if chunks and record.num_decodes else "prefill" if chunks else "decode"] += 1
        self.num_generated_tokens += record.num_new_tokens
        self.histograms["iteration_tokens_total"].observe(record.num_tokens)
        # A row that decodes gets a token in each step, so that its last one is as old as the last step.
        if self._last is not None:
            since = record.ended_s - self._last.ended_s
            self.histograms["inter_token_latency_seconds"].observe(since, record.num_new_tokens - first)
        self._last = record
        return num_first - first

    def _add_ended(self, output: RequestOutput, metrics: RequestMetrics) -> None:
        found = self.histograms
        for completion in output.outputs:
            assert completion.finish_reason is not None
            self.num_ended[completion.finish_reason.value] += 1
        if metrics.finished_s is None or metrics.first_token_s is None or metrics.scheduled_s is None:
            return  # it has failed, or was aborted early
        found["request_time_per_output_token_seconds"].observe(metrics.tpot_s)
        found["e2e_request_latency_seconds"].observe(metrics.finished_s - metrics.arrival_s)
        found["request_queue_time_seconds"].observe(metrics.queue_s)
        found["request_prefill_time_seconds"].observe(metrics.first_token_s - metrics.scheduled_s)
        found["request_decode_time_seconds"].observe(metrics.finished_s - metrics.first_token_s)
        found["request_inference_time_seconds"].observe(metrics.finished_s - metrics.scheduled_s)
        found["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        computed = len(output.prompt_token_ids) - metrics.num_cached_tokens
        found["request_prefill_kv_computed_tokens"].observe(computed)
        found["request_generation_tokens"].observe(metrics.num_output_tokens)
