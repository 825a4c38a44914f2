"""Models with recurrent layers in the engine: chunks, batches, prefix cache, preemption, and what is refused."""

import contextlib
import functools
import signal
import subprocess
import sys

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.activations import activations
from ksana_jax.engine.inspect.snapshot import take_snapshot
from ksana_jax.kv.reading import read_bytes
from ksana_jax.serve.server.kv_events import refusal
from tests import machine
from tests.golden.cases import golden_case

pytestmark = pytest.mark.usefixtures("few_shapes")
CASE, KIMI = golden_case("lfm2-gqa-conv-tied"), "kimi_linear-delta-latent-experts"
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=0, detokenize=False)
RNG = np.random.default_rng(11)
TEXT = RNG.integers(2, 128, 90).tolist()
# Prompts that share beginnings of 0 to 72 tokens, most of them not at the end of a block.
PROMPTS = [TEXT[:n] + RNG.integers(2, 128, 6).tolist() for n in (0, 3, 8, 20, 31, 48, 49, 72)]
SMALL = {"block_size": 4, "max_num_seqs": 4, "query_tile": 4, "max_num_batched_tokens": 24, "max_model_len": 112}
# Room for all snapshots and blocks.
EVERY = {"state_snapshots": {"method": "every", "blocks": 1, "num_slots": 400}, "num_blocks": 400}


@functools.cache
def engine(**settings) -> LLM:
    return LLM(str(CASE.model_dir), **SMALL | dict(settings))


def served(llm: LLM, prompts, params=GREEDY) -> list[tuple]:
    """Tokens and their log-probabilities, after a check of blocks and slots."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check()
    return [told(output) for output in outputs]


def told(output) -> tuple:
    [one] = output.outputs
    return tuple(one.token_ids), tuple(each[t].logprob for t, each in zip(one.token_ids, one.logprobs, strict=True))


@functools.cache
def alone() -> list[tuple]:
    """What a plain engine answers, one prompt after the other."""
    llm = engine()
    return [served(llm, [prompt])[0] for prompt in PROMPTS]


def assert_equal(found: list[tuple], expected: list[tuple]) -> None:
    for (tokens, logprobs), (other, others) in zip(found, expected, strict=True):
        assert tokens == other
        np.testing.assert_allclose(logprobs, others, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [CASE.name, "qwen3_next-gated-delta-experts", "granitemoehybrid-mamba-experts", KIMI])
def test_prompts_in_chunks_and_batches_get_the_tokens_of_transformers(name):
    case = golden_case(name)
    llm = LLM(str(case.model_dir), **SMALL | {"max_num_batched_tokens": 5})
    found = served(llm, [prompt.tolist() for prompt in case.prompts])
    assert [tokens for tokens, _ in found] == [tuple(greedy.tolist()) for greedy in case.greedy]


def test_a_batch_gets_the_tokens_that_each_prompt_gets_alone():
    assert_equal(served(engine(), PROMPTS), alone())


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_eviction": {"method": "h2o", "budget": 16}},
        pytest.param({"kv_eviction": {"method": "snapkv", "budget": 20}}, marks=pytest.mark.soak),
        {"kv_cache_dtype": "gear4", "block_size": 8},
    ],
    ids=str,
)
def test_attention_layers_evict_and_encode_whatever_else_is_served(settings):
    llm = LLM(str(CASE.model_dir), **SMALL | settings)
    expected = [served(llm, [prompt])[0] for prompt in PROMPTS]
    assert sum(a[0] != b[0] for a, b in zip(expected, alone(), strict=True)) >= ("kv_eviction" in settings)
    assert_equal(served(llm, PROMPTS), expected)
    [both] = llm.generate(PROMPTS[-1:], SamplingParams(temperature=0, max_tokens=16, n=2, detokenize=False))
    assert [tuple(one.token_ids) for one in both.outputs] == [expected[-1][0]] * 2
    few = {"num_blocks": 30 if "kv_eviction" in settings else 40, "host_cache_bytes": 2**20, "preempt": "swap"}
    llm = LLM(str(CASE.model_dir), **SMALL | settings | few)
    assert_equal(served(llm, PROMPTS), expected)
    assert sum(record.num_preemptions for record in llm.records)


def test_a_cached_prefix_of_evicted_blocks_is_refused():
    with pytest.raises(ConfigError, match="has no state: set it to false"):
        LLM(str(CASE.model_dir), **SMALL, kv_eviction={"method": "h2o", "budget": 16}, enable_prefix_caching=True)


def test_a_query_reads_the_blocks_of_attention_layers_alone():
    layout = engine().engine.scheduler.layout
    assert read_bytes(layout, 40, 10) == 10 * layout.block_bytes
    selects = LLM(str(CASE.model_dir), **SMALL, kv_selection={"method": "quest", "budget": 16}).engine.scheduler.layout
    summaries = selects.block_bytes - layout.block_bytes
    assert read_bytes(selects, 40, 10) == 4 * layout.block_bytes + 10 * summaries


def test_recurrent_layers_have_no_keys_in_full_precision():
    biases = str(golden_case("lfm2-mha-conv-biases").model_dir)
    exact = {"kv_cache_dtype": "int8", "kv_full_precision_layers": [0]}
    found = served(LLM(biases, **SMALL | exact), PROMPTS)
    for (_, logprobs), (_, others) in zip(found, served(LLM(biases, **SMALL), PROMPTS), strict=True):
        np.testing.assert_allclose(logprobs[:1], others[:1], atol=0.05)
    with pytest.raises(ConfigError, match="layers without keys and values: 1 is recurrent"):
        LLM(biases, **SMALL | exact | {"kv_full_precision_layers": [1]})


@pytest.mark.parametrize(
    "settings",
    [{"num_scheduler_steps": 3}, {"async_scheduling": False}, {"shared_prefix_attention": True}],
    ids=str,
)
def test_cached_prefixes_keep_tokens(settings):
    llm = LLM(str(CASE.model_dir), **SMALL | EVERY | settings, enable_prefix_caching=True)
    assert_equal(served(llm, PROMPTS), alone())
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.engine.scheduler.check()
    assert_equal([told(output) for output in outputs], alone())
    # A snapshot after every block: all full blocks before the last token are reused.
    assert [output.num_cached_tokens for output in outputs] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]


@machine.native_products
@pytest.mark.cpu("invariant numerics")
@pytest.mark.parametrize("name", [CASE.name, "qwen3_5-gated-delta-tied", "granitemoehybrid-mamba-dense-tied", KIMI])
def test_a_cached_prefix_gives_the_bits_of_a_fresh_run(name):
    folder = str(golden_case(name).model_dir)
    settings = {"numerics": "invariant", "block_size": 16, "max_num_batched_tokens": 20}
    fresh = LLM(folder, **SMALL | settings)
    expected = [served(fresh, [prompt])[0] for prompt in PROMPTS]
    settings |= {"enable_prefix_caching": True, "max_num_batched_tokens": 33, **EVERY}
    llm = LLM(folder, **SMALL | settings)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [told(output) for output in outputs] == expected
    assert max(output.num_cached_tokens for output in outputs) == 64


def test_preempted_sequences_get_the_same_tokens():
    for caching in (False, True):
        llm = LLM(str(CASE.model_dir), **SMALL, num_blocks=26, enable_prefix_caching=caching)
        assert_equal(served(llm, PROMPTS), alone())
        assert llm.records[-1].num_preemptions > 0


def test_random_arrivals_with_few_slots_and_blocks_get_the_same_tokens():
    rng, expected = np.random.default_rng(3), dict(enumerate(alone()))
    slots = {"state_snapshots": {"method": "every", "blocks": 2, "num_slots": 9}}
    llm = LLM(str(CASE.model_dir), **SMALL | slots, num_blocks=48, enable_prefix_caching=True)
    waiting, which = rng.permutation(np.repeat(np.arange(len(PROMPTS)), 4)).tolist(), {}
    while waiting or llm.engine.has_work:
        for _ in range(min(int(rng.integers(0, 3)), len(waiting))):
            number = waiting.pop()
            which[llm.engine.add_request(np.array(PROMPTS[number]), GREEDY)] = number
        llm.engine.step()
        llm.engine.scheduler.check()
    assert_equal([told(request.output()) for request in which], [expected[number] for number in which.values()])
    assert llm.engine.memory.counters.replaced_states > 0


@pytest.fixture(scope="module")
def caching() -> LLM:
    return LLM(str(CASE.model_dir), **SMALL, enable_prefix_caching=True, prefix_report_blocks=8)


def test_prompts_that_come_together_compute_their_prefix_once(caching):
    prompts = [TEXT[:60], [*TEXT[:60], 5, 7], [*TEXT[:60], 9]]
    outputs = caching.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 56, 60]


def test_completions_of_one_prompt_share_its_state():
    params = SamplingParams(temperature=0, n=3, max_tokens=16, detokenize=False)
    for prompt, expected in zip(PROMPTS, alone(), strict=True):
        [output] = engine().generate([prompt], params, use_tqdm=False)
        assert [tuple(one.token_ids) for one in output.outputs] == 3 * [expected[0]]
        assert output.metrics.num_blocks_by_origin["shared"] == 2 * -(
            -(len(prompt) - 1) // 4
        )  # nothing is computed twice


def test_beams_share_states():
    params = SamplingParams(beam_width=3, n=3, max_tokens=12, detokenize=False)
    few = {"state_snapshots": {"method": "every", "num_slots": 4}}
    again = LLM(str(CASE.model_dir), **SMALL | few)  # none left to share: texts are computed again
    for settings in ({}, {"enable_prefix_caching": True}):
        found, expected = (llm.generate(PROMPTS[:4], params, use_tqdm=False) for llm in (engine(**settings), again))
        for one, other in zip(found, expected, strict=True):
            assert [beam.token_ids for beam in one.outputs] == [beam.token_ids for beam in other.outputs]
            np.testing.assert_allclose(
                *([beam.cumulative_logprob for beam in o.outputs] for o in (one, other)), atol=1e-4
            )
            assert one.metrics.num_blocks_by_origin["shared"] and "shared" not in other.metrics.num_blocks_by_origin


def test_a_report_tells_how_far_keys_and_how_far_states_reach(caching):
    text = TEXT[::-1]
    caching.generate([text[:41]], GREEDY, use_tqdm=False)
    [output] = caching.generate([[*text[:30], 5]], GREEDY, use_tqdm=False)
    report = output.prefix_report
    assert (report.cause, report.num_cached, report.num_known, report.num_states) == ("state", 0, 28, 0)
    assert "keys and values of 28 are cached" in str(report)
    assert (output.metrics.num_cached_keys, output.metrics.num_cached_states) == (28, 0)
    [output] = caching.generate([text[:41]], GREEDY, use_tqdm=False)
    assert (output.num_cached_tokens, output.metrics.num_cached_keys, output.metrics.num_cached_states) == (40, 40, 40)


def test_slots_are_counted_and_routers_get_events(caching):
    caching.generate(PROMPTS, GREEDY, use_tqdm=False)
    snapshot = take_snapshot(caching.engine)
    [(tier, counted)] = snapshot.summary()["slots"].items()
    assert (tier, counted["held"], sum(counted.values())) == ("device", 0, 12) and counted["cached"] > 0
    assert str(snapshot).endswith(
        f"device slots for states: {counted['free']} free, 0 held, {counted['cached']} cached"
    )
    assert refusal(caching.engine) == ""


def test_activations_of_recurrent_layers_are_refused(caching):
    with pytest.raises(ValueError, match="this model has recurrent layers"):
        activations(caching, PROMPTS[3])


def test_preempted_sequences_are_swapped_with_their_states():
    llm = LLM(str(CASE.model_dir), **SMALL, num_blocks=26, host_cache_bytes=2**18, preempt="swap")
    assert_equal(served(llm, PROMPTS), alone())
    counters = llm.engine.memory.counters, llm.engine.memory.states.own_counters
    assert counters[0].swapped_in > counters[1].swapped_in > 0


# Few blocks and slots on the device, and more on the host.
TIERS = {"enable_prefix_caching": True, "num_blocks": 26, "host_cache_bytes": 2**19}
TIERS |= {"state_snapshots": {"method": "every", "blocks": 1, "num_slots": 9}}


def test_states_come_back_from_the_host_and_stay_there_asleep():
    llm = LLM(str(CASE.model_dir), **SMALL | TIERS)
    for _ in range(2):
        assert_equal(served(llm, PROMPTS), alone())
    memory = llm.engine.memory
    assert memory.counters.hits_host > 0 and memory.states.own_counters.loaded > 0
    llm.sleep(level=1)
    llm.wake_up()
    assert memory.states.pool.num_free == memory.states.pool.num_blocks
    loaded = memory.states.own_counters.loaded
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_equal([told(output) for output in outputs], alone())
    assert sum(o.num_cached_tokens for o in outputs) > 100 and memory.states.own_counters.loaded > loaded


SERVER = """
import os, signal, sys
from tests.engine.test_states import *
llm = LLM(sys.argv[1], **{**SMALL, **TIERS, **LASTING}, disk_cache_dir=sys.argv[2])
llm.generate(PROMPTS, GREEDY, use_tqdm=False)
llm.engine.memory.disk.flush(), llm.engine.memory.disk_states.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
LASTING = {"cache_write": "through", "disk_cache_bytes": 2**22, "numerics": "invariant", "block_size": 16}


@machine.native_products
@pytest.mark.cpu("invariant numerics")
@pytest.mark.parametrize(
    "name", [CASE.name, *(pytest.param(name, marks=pytest.mark.soak) for name in (KIMI, "olmo_hybrid-delta-tied"))]
)
def test_a_killed_server_finds_its_states_again_bit_for_bit(name, tmp_path):
    folder, settings = str(golden_case(name).model_dir), SMALL | {"numerics": "invariant", "block_size": 16}
    killed = subprocess.run([sys.executable, "-c", SERVER, folder, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    fresh = LLM(folder, **settings)
    expected = [served(fresh, [prompt])[0] for prompt in PROMPTS]
    with contextlib.closing(LLM(folder, **SMALL | TIERS | LASTING, disk_cache_dir=str(tmp_path))) as llm:
        llm.engine.memory.disk_reads._timeout_s = 60.0
        outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
        assert [told(output) for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
        assert llm.engine.memory.disk_states.counters.read > 0


def test_a_session_has_the_state_after_its_last_block(tmp_path):
    first, second = (LLM(str(CASE.model_dir), **SMALL | EVERY, enable_prefix_caching=True) for _ in range(2))
    [output] = first.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    text = PROMPTS[3] + output.outputs[0].token_ids
    assert first.save_session(output, tmp_path) == second.restore_session(tmp_path) == (len(text) - 1) // 4 * 4
    longer, expected = [*text, 5, 9], engine().generate([[*text, 5, 9]], GREEDY, use_tqdm=False)[0]
    [found] = second.generate([longer], GREEDY, use_tqdm=False)
    second.engine.scheduler.check()
    assert found.num_cached_tokens == (len(text) - 1) // 4 * 4
    assert_equal([told(found)], [told(expected)])


def test_too_few_slots_are_refused():
    with pytest.raises(ConfigError, match="num_slots 7, max_num_seqs 4 needs 8, two for each row"):
        LLM(
            str(CASE.model_dir),
            **SMALL,
            enable_prefix_caching=True,
            state_snapshots={"method": "every", "num_slots": 7},
        )


def test_memory_is_divided_between_blocks_and_slots():
    llm = engine()
    plan, states = llm.memory_plan, llm.engine.scheduler.layout.states
    # Three layers of two inputs of 32 numbers in float32.
    assert plan.state_bytes == states.nbytes == 8 * states.slot_bytes == 8 * 3 * 2 * 32 * 4
    with pytest.raises(ConfigError, match=r"a KV block takes .* besides 6.0 KiB for states"):
        LLM(str(CASE.model_dir), **SMALL, memory_bytes=6500)
