"""Models with recurrent layers in the engine: chunks, batches, prefix cache, preemption, and what is refused."""

import functools

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.activations import activations
from ksana_jax.engine.sessions import SessionError
from tests import machine
from tests.golden.cases import golden_case

pytestmark = pytest.mark.usefixtures("few_shapes")
CASE = golden_case("lfm2-gqa-conv-tied")
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


@pytest.mark.parametrize("name", [CASE.name, "qwen3_next-gated-delta-experts", "granitemoehybrid-mamba-experts"])
def test_prompts_in_chunks_and_batches_get_the_tokens_of_transformers(name):
    case = golden_case(name)
    llm = LLM(str(case.model_dir), **SMALL | {"max_num_batched_tokens": 5})
    found = served(llm, [prompt.tolist() for prompt in case.prompts])
    assert [tokens for tokens, _ in found] == [tuple(greedy.tolist()) for greedy in case.greedy]


def test_a_batch_gets_the_tokens_that_each_prompt_gets_alone():
    assert_equal(served(engine(), PROMPTS), alone())


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
@pytest.mark.parametrize("name", [CASE.name, "qwen3_5-gated-delta-tied", "granitemoehybrid-mamba-dense-tied"])
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


def test_completions_of_one_prompt_get_their_own_states():
    params = SamplingParams(temperature=0, n=3, max_tokens=16, detokenize=False)
    [output] = engine().generate([PROMPTS[3]], params, use_tqdm=False)
    assert [tuple(one.token_ids) for one in output.outputs] == 3 * [alone()[3][0]]


def test_a_report_tells_how_far_keys_and_how_far_states_reach(caching):
    text = TEXT[::-1]
    caching.generate([text[:41]], GREEDY, use_tqdm=False)
    [output] = caching.generate([[*text[:30], 5]], GREEDY, use_tqdm=False)
    report = output.prefix_report
    assert (report.cause, report.num_cached, report.num_known, report.num_states) == ("state", 0, 28, 0)
    assert "keys and values of 28 are cached" in str(report)


def test_what_has_no_states_yet_is_refused(caching, tmp_path):
    with pytest.raises(SessionError, match="recurrent layers, whose states a session does not have"):
        caching.save_session(caching.generate([PROMPTS[3]], GREEDY, use_tqdm=False)[0], tmp_path / "s")
    with pytest.raises(ValueError, match="this model has recurrent layers"):
        activations(caching, PROMPTS[3])


def test_sleep_forgets_states(caching):
    served(caching, PROMPTS)
    caching.sleep(level=1)
    caching.wake_up()
    assert caching.engine.memory.states.pool.num_free == caching.engine.memory.states.pool.num_blocks
    assert_equal(served(caching, PROMPTS), alone())


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
    assert plan.state_bytes == states.nbytes == 4 * states.slot_bytes == 4 * 3 * 2 * 32 * 4
    with pytest.raises(ConfigError, match=r"a KV block takes .* besides 3.0 KiB for states"):
        LLM(str(CASE.model_dir), **SMALL, memory_bytes=3500)
