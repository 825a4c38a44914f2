"""Prometheus metrics of an AsyncLLM: vLLM's names where vLLM has the metric, `ksana:` for the rest.

Most are read from the engines' own counters when they are asked for. The others are added up once per step, see
`serve.server.totals`, never per token.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ksana_jax.core.prefix_report import CAUSES
from ksana_jax.core.request import FinishReason
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.inspect.snapshot import counts, moved_bytes
from ksana_jax.engine.llm import LLM
from ksana_jax.engine.model_memory import resident_bytes
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.tier import Tier
from ksana_jax.scheduler.speculative.speculation import Speculation
from ksana_jax.serve.server.block_times import BlockTimes
from ksana_jax.serve.server.histogram import Histogram
from ksana_jax.serve.server.totals import Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_NAME = 256
_REASONS = tuple(reason.value for reason in FinishReason)
_HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from a request's arrival, before tokenizing, to its first token.",
    "inter_token_latency_seconds": "Seconds between steps, for each token of a row that decodes in both.",
    "request_time_per_output_token_seconds": "Mean seconds per token after the first, of a request.",
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its end.",
    "request_queue_time_seconds": "Seconds from a request's arrival to the first step that computes some of it.",
    "request_prefill_time_seconds": "Seconds from a request's first step to its first token.",
    "request_decode_time_seconds": "Seconds from a request's first token to its end.",
    "request_inference_time_seconds": "Seconds from a request's first step to its end.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_prefill_kv_computed_tokens": "Tokens of a request's prompt that were not in the prefix cache.",
    "request_generation_tokens": "Tokens that a request has generated, in all its completions.",
    "request_params_n": "Completions that a request asks for.",
    "request_params_max_tokens": "Most tokens that a request asks for.",
    "iteration_tokens_total": "Tokens computed by a step.",
}
_BLOCKS = {
    "kv_block_lifetime_seconds": "Seconds for which a block was cached until it was replaced; a sample of blocks.",
    "kv_block_idle_before_evict_seconds": "Seconds from a block's last use until it was replaced; a sample of blocks.",
    "kv_block_reuse_gap_seconds": "Seconds between hits of a block that was replaced; a sample, the last four hits.",
}


class ServingMetrics(Collector):
    """The metrics of an AsyncLLM from this object's creation on, in a registry of its own.

    Labels are the model's name, the number of the replica, and for some metrics one of a few fixed values: a client
    cannot add any.

    Args:
      model_name: as clients know the model; cut after 256 characters.
      loop_lag: of the event loop, in seconds.
      block_sample: share of the cached blocks whose times are measured, see `BlockTimes`; 0 for none.
    """

    def __init__(self, llm: AsyncLLM, model_name: str, loop_lag: Histogram, block_sample: float = 0.0):
        self._llm, self._model_name, self._loop_lag = llm, model_name[:_MOST_NAME], loop_lag
        self._block_times: dict[Engine, BlockTimes] = {}
        if block_sample:
            self._block_times = {engine: BlockTimes(block_sample) for engine in llm.replicas.engines}
            llm.between_steps(lambda engine: self._block_times[engine].attach(engine))
        self.totals = [Totals(llm.max_model_len) for _ in llm.replicas.engines]
        self._num_refused: collections.Counter[str] = collections.Counter()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        llm.observers.append(lambda news: self.totals[news.replica].observe(news))

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format, see CONTENT_TYPE."""
        return generate_latest(self.registry)

    def refused(self, reason: str) -> None:
        """Counts a request that the server has refused. reason: one of a few, such as "queue_full"."""
        self._num_refused[reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, for the registry."""
        families = _Families(self._model_name)
        for index, (engine, totals) in enumerate(zip(self._llm.replicas.engines, self.totals, strict=True)):
            families.engine = str(index)
            _add_engine(families, engine)
            _add_totals(families, totals)
            if engine in self._block_times:
                _add_histograms(families, _BLOCKS, self._block_times[engine].histograms)
        families.engine = ""
        if self._llm.llm is not None:
            _add_model_memory(families, self._llm.llm)
        for reason, count in self._num_refused.items():
            families.counter("ksana:refused_requests", "Requests refused by the server.", count, reason=reason)
        stats, text = self._llm.stats(), "Prompt tokens of requests that have no first token yet."
        families.gauge("ksana:queued_prefill_tokens", text, stats.num_prefill_tokens)
        families.gauge("ksana:draining", "1 while new requests are refused.", stats.is_draining)
        text = "Programs that are compiled while requests are served, whose steps take larger ones."
        families.gauge("ksana:compiling", text, stats.num_compiling)
        text = "Seconds by which the event loop runs late what is due, looked at ten times a second."
        lag = self._loop_lag
        families.histogram("ksana:event_loop_lag_seconds", text, list(lag.buckets()), lag.sum)
        yield from families.found.values()


class _Families:
    """Collects samples of metrics by name. engine: number of the replica that the next samples are of."""

    def __init__(self, model_name: str):
        self.found: dict[str, Any] = {}
        self._model_name, self.engine = model_name, ""

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, text, labels, value)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """Adds a sample of a counter; "_total" is added to its name."""
        self._add(CounterMetricFamily, name, text, labels, value)

    def histogram(self, name: str, text: str, buckets: list[tuple[str, float]], total: float) -> None:
        self._add(HistogramMetricFamily, name, text, {}, buckets, total)

    def _add(self, kind: Any, name: str, text: str, labels: dict[str, str], *sample: Any) -> None:
        names, values = ["model_name", "engine", *labels], [self._model_name, self.engine, *labels.values()]
        if name not in self.found:
            self.found[name] = kind(name, text, labels=names)
        self.found[name].add_metric(values, *sample)


def _add_speculation(families: _Families, speculation: Speculation) -> None:
    counts = speculation.counts
    families.counter("vllm:spec_decode_num_drafts", "Drafts that were verified.", counts.num_drafts)
    families.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.", counts.num_draft_tokens)
    text = "Draft tokens that were accepted."
    families.counter("vllm:spec_decode_num_accepted_tokens", text, counts.num_accepted_tokens)
    text = "Draft tokens that were accepted, by their position in the draft."
    for position, count in enumerate(counts.accepted_per_pos.tolist()):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        families.counter(name, text, count, position=str(position))
    text = "Seconds in which drafts were made; with a draft model, its steps."
    families.counter("ksana:spec_decode_proposer_seconds", text, counts.proposer_s)
    text = "Calls of the proposer that failed, whose drafts were lost."
    families.counter("ksana:spec_decode_proposer_failures", text, counts.num_failures)


def _add_engine(families: _Families, engine: Engine) -> None:
    """Adds an engine's own counters; read while it runs, so numbers may be of two steps."""
    scheduler, memory = engine.scheduler, engine.memory
    pool, counted = scheduler.blocks, counts(memory)
    families.gauge("vllm:num_requests_running", "Sequences that hold a row.", len(scheduler.order))
    families.gauge("vllm:num_requests_waiting", "Sequences that wait for a row.", len(scheduler.waiting))
    families.gauge("vllm:kv_cache_usage_perc", "Blocks in use, of all blocks, 0 to 1.", pool.num_used / pool.num_blocks)
    config = {
        "block_size": str(pool.block_size),
        "num_gpu_blocks": str(pool.num_blocks),
        "cache_dtype": str(engine.config.kv_dtype),
        "enable_prefix_caching": str(engine.config.enable_prefix_caching),
        "kv_cache_size_tokens": str(pool.num_blocks * pool.block_size),
    }
    families.gauge("vllm:cache_config_info", "1; settings of the KV cache as labels.", 1, **config)
    families.counter("vllm:num_preemptions", "Preemptions of sequences.", scheduler.num_preemptions)
    if scheduler.speculation is not None:
        _add_speculation(families, scheduler.speculation)
    text = "Prompt tokens looked up in the prefix cache."
    families.counter("vllm:prefix_cache_queries", text, counted["queried_tokens"])
    families.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", counted["hit_tokens"])
    if (reporter := memory.prefixes.reporter) is not None:
        for cause in CAUSES:
            text = "Requests, by why the prefix cache reused no more of their prompts."
            families.counter("ksana:prefix_misses", text, reporter.num_requests[cause], cause=cause)
            text = "Prompt tokens that these requests have computed."
            families.counter("ksana:prefix_miss_tokens", text, reporter.num_tokens[cause], cause=cause)
    compiled = getattr(engine.executor, "num_compilations", 0)  # a simulator's has none
    families.counter("ksana:compilations", "Functions compiled since the model was loaded.", compiled)
    block_bytes, text = memory.layout.block_bytes, "Bytes of KV cache: in use by requests, or kept for their content."
    _add_tiers(families, "ksana:kv_bytes", text, block_bytes, memory.device, memory.host, memory.disk)
    if (states := memory.states) is not None and memory.layout.states is not None:
        text = "Bytes of states of recurrent layers: in use by requests, or kept for their content."
        slot_bytes = memory.layout.states.slot_bytes
        _add_tiers(families, "ksana:state_bytes", text, slot_bytes, states, states.host, states.disk)
        text = "Prompt tokens whose keys and values were in the prefix cache."
        families.counter("ksana:prefix_cache_key_tokens", text, counted["key_tokens"])
        text = "Prompt tokens up to the last state of recurrent layers in the prefix cache."
        families.counter("ksana:prefix_cache_state_tokens", text, counted["state_tokens"])
        text = "States of recurrent layers that entered the prefix cache, or were replaced there."
        for event, name in (("cached", "snapshots"), ("replaced", "replaced_states")):
            families.counter("ksana:state_snapshots", text, counted[name], event=event)
    for way, size in moved_bytes(counted, block_bytes).items():
        text = "Bytes of KV cache moved between tiers, and copied on the device."
        families.counter("ksana:kv_moved_bytes", text, size, way=way.replace(" ", "_"))


def _add_tiers(
    families: _Families, name: str, text: str, size: int, device: Tier, host: Tier | None, disk: DiskTier | None
) -> None:
    """Adds the bytes of tiers. size: bytes of each of their blocks."""
    for level, tier in (("device", device), ("host", host)):
        if tier is not None:
            families.gauge(name, text, tier.pool.num_used * size, tier=level, state="in_use")
            families.gauge(name, text, tier.pool.num_idle * size, tier=level, state="cached")
    if disk is not None:
        families.gauge(name, text, disk.num_bytes, tier="disk", state="cached")


def _add_model_memory(families: _Families, llm: LLM) -> None:
    """Adds the memory of a model, and whether it sleeps."""
    text = "Bytes of weights with adapters, and of the pool, on the device, or each of several; of weights on the host."
    for part, num_bytes in resident_bytes(llm).items():
        families.gauge("ksana:resident_bytes", text, num_bytes, part=part)
    families.gauge("ksana:awake", "1 while the model is awake, 0 while it sleeps.", not llm.is_sleeping)
    families.gauge("ksana:wake_seconds", "Seconds that the model took to wake up the last time.", llm.wake_s)


def _add_totals(families: _Families, totals: Totals) -> None:
    """Adds the totals of `serve.server.totals`."""
    text = "Prompt tokens of requests that have their first token, cached ones included."
    families.counter("vllm:prompt_tokens", text, totals.num_prompt_tokens)
    cached = totals.num_cached_tokens
    families.counter("vllm:prompt_tokens_cached", "Those of them that were in the prefix cache.", cached)
    for source, count in (("local_compute", totals.num_prompt_tokens - cached), ("local_cache_hit", cached)):
        text = "Prompt tokens by where their keys and values came from."
        families.counter("vllm:prompt_tokens_by_source", text, count, source=source)
    families.counter("vllm:generation_tokens", "Tokens generated.", totals.num_generated_tokens)
    for reason in _REASONS:
        count = totals.num_ended[reason]
        families.counter("vllm:request_success", "Completions that have ended.", count, finished_reason=reason)
    for kind in ("prefill", "decode", "mixed"):
        families.counter("ksana:steps", "Steps computed.", totals.num_steps[kind], kind=kind)
    text = "Steps that have failed, which has ended the requests of their engine."
    families.counter("ksana:failed_steps", text, totals.num_failed_steps)
    _add_histograms(families, _HISTOGRAMS, totals.histograms)


def _add_histograms(families: _Families, texts: Mapping[str, str], histograms: Mapping[str, Histogram]) -> None:
    for name, text in texts.items():
        families.histogram(f"vllm:{name}", text, list(histograms[name].buckets()), histograms[name].sum)
