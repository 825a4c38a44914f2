"""States of recurrent layers next to a pool of latents, as in Kimi Linear: both are cached, shared and moved."""

import functools

import pytest

from ksana_jax import LLM, SamplingParams
from tests.engine.test_states import EVERY, GREEDY, PROMPTS, SMALL, TIERS, assert_equal, served, told
from tests.golden.cases import golden_case

pytestmark = pytest.mark.usefixtures("few_shapes")
FOLDER = str(golden_case("kimi_linear-delta-latent-experts").model_dir)


@functools.cache
def engine(**settings) -> LLM:
    return LLM(FOLDER, **SMALL | dict(settings))


@functools.cache
def alone() -> list[tuple]:
    return [served(engine(), [prompt])[0] for prompt in PROMPTS]


def test_a_slot_holds_states_and_a_block_one_side_of_latents():
    layout = engine().engine.scheduler.layout
    assert (layout.states.layers, [leaf.shape[:3] for leaf in layout.leaves]) == ((0, 1, 3), [(1, 1, 1)])
    # Of three layers: three inputs of 54 channels, and three heads of 6 by 6.
    assert layout.states.slot_bytes == 3 * (3 * 54 + 3 * 6 * 6) * 4


def test_cached_prefixes_keep_tokens():
    llm = LLM(FOLDER, **SMALL | EVERY, enable_prefix_caching=True)
    assert_equal(served(llm, PROMPTS), alone())
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.engine.scheduler.check()
    assert_equal([told(output) for output in outputs], alone())
    assert [output.num_cached_tokens for output in outputs] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]


def test_preempted_sequences_are_swapped_with_latents_and_states():
    llm = LLM(FOLDER, **SMALL, num_blocks=26, host_cache_bytes=2**18, preempt="swap")
    assert_equal(served(llm, PROMPTS), alone())
    assert llm.engine.memory.counters.swapped_in > llm.engine.memory.states.own_counters.swapped_in > 0


def test_latents_and_states_come_back_from_the_host():
    llm = LLM(FOLDER, **SMALL | TIERS)
    for _ in range(2):
        assert_equal(served(llm, PROMPTS), alone())
    llm.sleep(level=1)
    llm.wake_up()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_equal([told(output) for output in outputs], alone())
    assert sum(o.num_cached_tokens for o in outputs) > 100 and llm.engine.memory.states.own_counters.loaded > 0


def test_completions_and_beams_share_them():
    params = SamplingParams(temperature=0, n=3, max_tokens=16, detokenize=False)
    for output, expected in zip(engine().generate(PROMPTS[::3], params, use_tqdm=False), alone()[::3], strict=True):
        assert [tuple(one.token_ids) for one in output.outputs] == 3 * [expected[0]]
        assert output.metrics.num_blocks_by_origin["shared"]
    params = SamplingParams(beam_width=3, n=3, max_tokens=12, detokenize=False)
    again = LLM(FOLDER, **SMALL, state_snapshots={"method": "every", "num_slots": 4})  # computes texts again
    found, expected = (llm.generate(PROMPTS[:3], params, use_tqdm=False) for llm in (engine(), again))
    for one, other in zip(found, expected, strict=True):
        assert [beam.token_ids for beam in one.outputs] == [beam.token_ids for beam in other.outputs]


@pytest.mark.parametrize(
    "settings", [{"kv_eviction": {"method": "h2o", "budget": 16}}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_latents_are_evicted_and_encoded_next_to_states(settings):
    llm = LLM(FOLDER, **SMALL | settings)
    expected = [served(llm, [prompt])[0] for prompt in PROMPTS]
    assert expected != alone()
    assert_equal(served(llm, PROMPTS), expected)
