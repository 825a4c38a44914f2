"""Prometheus metrics: vLLM's names, the right numbers, and bounded labels."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ksana_jax import LLM
from ksana_jax.core.metrics import StepRecord
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine_thread import StepNews
from ksana_jax.serve.server.generation import Usage
from ksana_jax.serve.server.histogram import Histogram, LoopLag, one_two_five
from ksana_jax.serve.server.metrics import ServingMetrics
from ksana_jax.serve.server.totals import Totals
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens
from tests.golden.cases import golden_case
from tests.guessing import ANSWERS
from tests.serve.server.serving import slow

# What dashboards and routers for vLLM read.
VLLM = """
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions prefix_cache_queries prefix_cache_hits
prompt_tokens generation_tokens request_success time_to_first_token_seconds inter_token_latency_seconds
e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_inference_time_seconds request_prompt_tokens request_generation_tokens request_params_n
request_prefill_kv_computed_tokens prompt_tokens_cached prompt_tokens_by_source cache_config_info
request_params_max_tokens iteration_tokens_total request_time_per_output_token_seconds
""".split()


def read(metrics: ServingMetrics) -> dict[tuple, float]:
    """Samples by name and label values in the order of label names, without model and replica."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            more = {k: v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine")}
            found[(sample.name, *more.values())] = sample.value
    return found


async def test_the_numbers_of_a_known_load():
    stored = {"prefix_report_blocks": 8}
    async with AsyncLLM.around(make_engine(num_blocks=256, caching=True, max_num_seqs=8, stored=stored)) as llm:
        metrics = ServingMetrics(llm, "m", LoopLag().histogram)
        for asked in (asking(5), asking(5), asking(4, n=2, temperature=1)):
            await (await llm.submit(prompt_of(12), asked)).result()
        late = await llm.submit(prompt_of(4, 9), asking(40), delta=True)
        await anext(late)
        await llm.abort(late.request_id)
        for _ in range(100):
            found = read(metrics)
            if found["vllm:request_success_total", "abort"]:
                break
            await asyncio.sleep(0.01)
        assert found["vllm:request_success_total", "length"] == 4
        assert found["vllm:prompt_tokens_total",] == 3 * 12 + 4
        assert found["vllm:prompt_tokens_cached_total",] == found["vllm:prefix_cache_hits_total",]
        computed = found["vllm:prompt_tokens_by_source_total", "local_compute"]
        assert computed + found["vllm:prompt_tokens_cached_total",] == 3 * 12 + 4
        assert found["vllm:request_prefill_kv_computed_tokens_sum",] == computed
        assert found["vllm:cache_config_info", "4", "f32", "True", "1024", "256"] == 1
        by_cause = {key[1]: value for key, value in found.items() if key[0] == "ksana:prefix_misses_total"}
        assert {cause: value for cause, value in by_cause.items() if value} == {"never_seen": 1, "partial_block": 3}
        assert sum(v for key, v in found.items() if key[0] == "ksana:prefix_miss_tokens_total") == computed
        assert found["vllm:generation_tokens_total",] >= 5 + 5 + 2 * 4 + 1
        assert found["vllm:request_generation_tokens_sum",] >= 5 + 5 + 2 * 4 + 1
        assert found["vllm:request_generation_tokens_count",] == 4
        assert found["vllm:request_generation_tokens_bucket", "5.0"] >= 2
        assert found["vllm:time_to_first_token_seconds_count",] == 4
        assert found["vllm:request_params_n_bucket", "1.0"] == 3
        assert found["vllm:request_params_n_bucket", "2.0"] == 4
        # Blocks of 4 tokens: the second and the third request find 8 of 12 tokens, or 11 of them.
        assert found["vllm:prefix_cache_hits_total",] >= 16
        assert found["vllm:prefix_cache_queries_total",] > found["vllm:prefix_cache_hits_total",]
        assert found["vllm:num_requests_running",] == found["vllm:num_requests_waiting",] == 0
        assert found["vllm:kv_cache_usage_perc",] == 0 < found["ksana:kv_bytes", "cached", "device"]
        steps = sum(found["ksana:steps_total", kind] for kind in ("prefill", "decode", "mixed"))
        assert steps == found["vllm:iteration_tokens_total_count",] == len(llm.engine.records)
        assert found["ksana:queued_prefill_tokens",] == found["ksana:draining",] == 0
        metrics.refused("queue_full")
        assert read(metrics)["ksana:refused_requests_total", "queue_full"] == 1


async def test_speculation_has_the_names_of_vllm():
    drafts = {"method": "tests.guessing:Guessing", "num_speculative_tokens": 3, "guesses": "right at first"}
    async with AsyncLLM.around(make_engine(speculative_config=drafts)) as llm:
        metrics = ServingMetrics(llm, "m", LoopLag().histogram)
        prompt = prompt_of(5)
        ANSWERS[prompt.tobytes()] = [reference_tokens(prompt, 30, FULLY)]
        output = await (await llm.submit(prompt, asking(30))).result()
        assert output.outputs[0].token_ids == ANSWERS[prompt.tobytes()][0]
        found, of_request = read(metrics), output.metrics
        assert found["vllm:spec_decode_num_drafts_total",] == of_request.num_drafts > 0
        assert found["vllm:spec_decode_num_draft_tokens_total",] == of_request.num_draft_tokens
        accepted = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(p)] for p in range(3)]
        assert found["vllm:spec_decode_num_accepted_tokens_total",] == sum(accepted) > 0
        assert accepted == sorted(accepted, reverse=True)
        assert found["ksana:spec_decode_proposer_seconds_total",] > 0
        assert found["ksana:spec_decode_proposer_failures_total",] == 0
        assert found["ksana:steps_total", "mixed"] == 0


async def test_vllm_names_are_there_and_every_sample_has_the_model():
    async with AsyncLLM.around(make_engine(num_blocks=64, caching=True, host_slots=8)) as llm:
        metrics = ServingMetrics(llm, 'a"b\n' + "x" * 1000, LoopLag().histogram)
        families = list(text_string_to_metric_families(metrics.render().decode()))
        names = {family.name for family in families}
        assert {f"vllm:{name}" for name in VLLM} <= names
        assert all(name.startswith(("vllm:", "ksana:")) for name in names)
        models = {s.labels["model_name"] for family in families for s in family.samples}
        assert models == {'a"b\n' + "x" * 252}
        assert {s.labels["tier"] for f in families if f.name == "ksana:kv_bytes" for s in f.samples} == {
            "device",
            "host",
        }


async def test_requests_that_wait_and_run_show_while_they_do():
    engine = make_engine(num_blocks=256, max_num_seqs=2, max_model_len=128)
    slow(engine, 0.005)
    async with AsyncLLM.around(engine) as llm:
        metrics = ServingMetrics(llm, "m", LoopLag().histogram)
        streams = await llm.submit_all([prompt_of(5, seed) for seed in range(5)], asking(100), delta=True)
        await anext(streams[0])
        found = read(metrics)
        assert (found["vllm:num_requests_running",], found["vllm:num_requests_waiting",]) == (2, 3)
        assert 0 < found["vllm:kv_cache_usage_perc",] < 1 and found["ksana:queued_prefill_tokens",] == 15
        assert found["ksana:kv_bytes", "in_use", "device"] > 0


def test_the_gap_between_tokens_is_that_between_steps_for_each_row_that_decodes():
    totals = Totals(128)

    def step(ended_s, num_new, num_first=0):
        record = StepRecord(ended_s, 8, 8, 8, 0, 0, 0, 0, num_new_tokens=num_new)
        first = asked[:num_first]
        totals.observe(StepNews(0, records=[record], first_tokens=first))

    engine = make_engine()
    asked = [engine.new_request(prompt_of(4), asking()) for _ in range(3)]
    gaps = totals.histograms["inter_token_latency_seconds"]
    step(1.0, 3, 3)
    assert gaps.count == 0
    step(1.02, 3)
    step(1.06, 5, 2)
    assert gaps.count == 6 and gaps.sum == pytest.approx(3 * 0.02 + 3 * 0.04)
    assert dict(gaps.buckets())["0.025"] == 3
    assert totals.num_generated_tokens == 11 and totals.num_steps == {"decode": 3}


async def test_failed_steps_and_their_requests_are_counted():
    async with AsyncLLM.around(make_engine()) as llm:
        metrics = ServingMetrics(llm, "m", LoopLag().histogram)
        llm.engine.executor.fails = "as told"  # pyright: ignore[reportAttributeAccessIssue]
        stream = await llm.submit(prompt_of(5), asking())
        await stream.result()
        found = read(metrics)
        assert found["ksana:failed_steps_total",] == 1 and found["vllm:request_success_total", "error"] == 1


def test_histograms_count_up_to_their_bounds():
    histogram = Histogram((1, 5))
    for value, times in ((1, 1), (1.5, 2), (5, 1), (9, 1), (None, 1), (3, 0)):
        histogram.observe(value, times)
    assert list(histogram.buckets()) == [("1.0", 1), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == 1 + 3 + 5 + 9 and histogram.count == 5
    assert one_two_five(60) == (1, 2, 5, 10, 20, 50)


async def test_hybrids_tell_how_far_keys_and_how_far_states_reach():
    sizes = {"max_model_len": 64, "num_blocks": 64, "block_size": 4, "query_tile": 4, "max_num_seqs": 2}
    folder = str(golden_case("lfm2-gqa-conv-tied").model_dir)
    engine = LLM(folder, **sizes, enable_prefix_caching=True, max_num_batched_tokens=16).engine
    async with AsyncLLM.around(engine) as llm:
        metrics, usage = ServingMetrics(llm, "m", LoopLag().histogram), Usage(17)
        for length in (30, 17):  # the state of the first is cached after 28 tokens
            output = await (await llm.submit(np.arange(2, 2 + length), asking(1))).result()
        found = read(metrics)
    usage.note([output])
    cached = {"cached_tokens": 0, "cached_key_tokens": 16, "cached_state_tokens": 0}
    assert usage.json()["prompt_tokens_details"] == cached
    reach = [found[f"ksana:prefix_cache_{what}_tokens_total",] for what in ("key", "state")]
    assert reach == [16, 0] and found["ksana:state_snapshots_total", "cached"] == 2
    assert found["ksana:state_bytes", "cached", "device"] == 2 * engine.scheduler.layout.states.slot_bytes
