"""The path of keys and values since their computation does not change a token: found again, chunked, swapped,
computed again, brought back from the host, copied on write, attended to in groups."""

import dataclasses
import functools

import numpy as np
import pytest

from ksana_jax import AttentionPattern, SamplingParams
from ksana_jax.runner import movers
from tests.engine.small import VOCAB, make_llm, model, tokens_of
from tests.reference import reference_logprobs

# The longest text just fits: 13 blocks of 4.
POOL = {"block_size": 4, "num_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 16, "query_tile": 16}
HOST = {"host_cache_bytes": 2**17}
PATTERNS = {
    "full": AttentionPattern(),
    "sliding": AttentionPattern(window=9),
    "sinks": AttentionPattern(window=11, num_sinks=2, sink_position="absolute"),
}
NUM_TOKENS = 16
RNG = np.random.default_rng(11)
COMMON = RNG.integers(2, VOCAB, 18).tolist()
# Three that share 18 tokens, two of those with one another 26; others share nothing.
PROMPTS = [COMMON + RNG.integers(2, VOCAB, n).tolist() for n in (3, 14)]
PROMPTS += [
    PROMPTS[1][:26] + RNG.integers(2, VOCAB, 5).tolist(),
    *(RNG.integers(2, VOCAB, n).tolist() for n in (33, 9)),
]


def asked(**settings) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False} | settings
    )


def engine(**settings):
    """An engine on the common pool."""
    return make_llm(**POOL | settings)


@functools.cache
def plain():
    return engine()


@functools.cache
def cold_solo(pattern: str) -> list[list[int]]:
    """Each prompt alone on an engine that keeps nothing, compared with the dense model."""
    llm = plain()
    llm.set_pattern(PATTERNS[pattern])
    alone = [tokens_of(llm, [p], asked())[0] for p in PROMPTS]
    config, params = model()
    for prompt, tokens in zip(PROMPTS, alone, strict=True):
        expected = reference_logprobs(params, config, np.array(prompt + tokens), PATTERNS[pattern])
        assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    return alone


@pytest.mark.parametrize("pattern", PATTERNS)
def test_prefixes_found_on_the_device(pattern):
    expected = cold_solo(pattern)
    llm = engine(enable_prefix_caching=True)
    llm.set_pattern(PATTERNS[pattern])
    counters = llm.engine.memory.counters
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        for _ in range(2):
            before = counters.hits_device
            assert tokens_of(llm, [prompt], asked()) == [tokens]
        assert counters.hits_device > before
    assert tokens_of(llm, PROMPTS, asked()) == expected
    # The next turn of a chat finds what was generated.
    [output] = llm.generate({"prompt_token_ids": PROMPTS[4] + expected[4][:-1]}, asked(max_tokens=1))
    assert output.outputs[0].token_ids == expected[4][-1:] and output.num_cached_tokens >= 20


@pytest.mark.parametrize("pattern", PATTERNS)
def test_prefixes_found_within_chunks_of_any_size(pattern):
    expected = cold_solo(pattern)
    llm = engine(enable_prefix_caching=True, max_num_batched_tokens=5)
    llm.set_pattern(PATTERNS[pattern])
    for _ in range(2):
        assert tokens_of(llm, PROMPTS, asked()) == expected
    assert llm.engine.memory.counters.hit_tokens > 0


@pytest.fixture(params=["none", "pinned_host"])
def staging(request, monkeypatch) -> str:
    """Memory that blocks cross between device and host; "auto" is "none" on a CPU, "pinned_host" on CUDA and TPU."""
    found = dataclasses.replace(movers.capabilities(), staging=request.param)
    monkeypatch.setattr(movers, "capabilities", lambda: found)
    return request.param


@pytest.mark.usefixtures("staging")
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("preempt", ["swap", "recompute", "auto"])
def test_preempted_rows_swapped_or_computed_again(preempt, caching):
    llm = engine(preempt=preempt, enable_prefix_caching=caching, **HOST)
    assert tokens_of(llm, PROMPTS, asked()) == cold_solo("full")
    counters = llm.engine.memory.counters
    assert llm.engine.scheduler.num_preemptions > 0
    assert preempt == "auto" or (counters.swapped_in > 0) == (preempt == "swap")


@pytest.mark.usefixtures("staging")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("write", ["back", "through"])
def test_prefixes_that_have_been_on_the_host(write, pattern):
    expected = cold_solo(pattern)
    llm = engine(enable_prefix_caching=True, cache_write=write, **HOST)
    llm.set_pattern(PATTERNS[pattern])
    for turn in range(3):
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert tokens_of(llm, [prompt], asked()) == [tokens], turn
    counters = llm.engine.memory.counters
    assert counters.replaced > 0 and counters.saved > 0 and counters.hits_host > 0


@pytest.mark.parametrize("eviction", ["lfu", "fifo", "newest_subtree_first", "cost_aware"])
def test_any_block_may_be_evicted(eviction):
    llm = engine(enable_prefix_caching=True, prefix_replacement=eviction, host_cache_bytes=2**14)
    for order in ([0, 1, 2, 3, 4], [2, 0, 3, 1, 4], [1, 4, 0, 2, 3]):
        assert tokens_of(llm, [PROMPTS[i] for i in order], asked()) == [cold_solo("full")[i] for i in order]
    assert llm.engine.memory.counters.replaced > 0 and llm.engine.memory.counters.hit_tokens > 0


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_completions_that_share_their_prompt_and_write_to_copies(caching, pattern):
    llm = engine(enable_prefix_caching=caching, num_blocks=40)
    llm.set_pattern(PATTERNS[pattern])
    prompts = PROMPTS[:2]
    assert tokens_of(llm, prompts, asked(n=3)) == [t for t in cold_solo(pattern)[:2] for _ in range(3)]
    params = asked(n=3, temperature=1.0, seed=8)
    requests = [llm.engine.add_request(np.array(prompt), params) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.memory.counters.copied > 0
    alone = plain()
    alone.set_pattern(PATTERNS[pattern])
    for request in requests:
        texts = [c.token_ids for c in request.completions]
        assert len(set(map(tuple, texts))) == 3
        for completion, text in zip(request.completions, texts, strict=True):
            seed = completion.seq.seed - (2**64 if completion.seq.seed >= 2**63 else 0)
            solo = asked(temperature=1.0, seed=seed)
            assert tokens_of(alone, [request.prompt_token_ids.tolist()], solo) == [text]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_over_a_shared_prefix_in_groups(pattern):
    llm = engine(enable_prefix_caching=True, shared_prefix_attention=True, num_blocks=40)
    llm.set_pattern(PATTERNS[pattern])
    llm.engine.builder = dataclasses.replace(llm.engine.builder, min_saved_tokens=1)
    shared, build = 0, llm.engine.builder.build

    def watched(*given):
        nonlocal shared
        step, ends = build(*given)
        if step.arrays.shared_starts is not None:
            shared += int((step.arrays.shared_starts < 64).sum())
        return step, ends

    object.__setattr__(llm.engine.builder, "build", watched)
    for _ in range(2):
        assert tokens_of(llm, PROMPTS, asked()) == cold_solo(pattern)
    assert tokens_of(llm, PROMPTS[:1], asked(n=4)) == [cold_solo(pattern)[0]] * 4
    assert shared > 0 or pattern == "sliding"  # whose rows share nothing that is still seen


def test_patterns_that_change_on_one_engine_share_only_what_is_the_same_under_both():
    llm = engine(enable_prefix_caching=True, **HOST)
    for pattern in ("full", "sinks", "sliding", "full", "sinks"):
        llm.set_pattern(PATTERNS[pattern])
        for _ in range(2):
            assert tokens_of(llm, PROMPTS, asked()) == cold_solo(pattern)
    assert llm.engine.memory.counters.hit_tokens > 0


def test_salts_keep_tenants_apart_and_change_no_token():
    llm = engine(enable_prefix_caching=True, num_blocks=40)
    prompt, cached = {"prompt_token_ids": PROMPTS[1]}, []
    for salt in ("a", "b", "a", ""):
        [output] = llm.generate(prompt | {"cache_salt": salt}, asked())
        assert output.outputs[0].token_ids == cold_solo("full")[1]
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 28, 0]


def test_nothing_is_compiled_after_warm_up_with_everything_on():
    llm = make_llm(**POOL, enable_prefix_caching=True, preempt="swap", host_cache_bytes=2**15, programs={})
    kinds = [asked(), asked(n=3, temperature=1.0), asked(beam_width=2, ignore_eos=False)]
    llm.warm_up(sampling_params=kinds)
    compiled = llm.num_compilations
    for pattern in PATTERNS.values():
        llm.set_pattern(pattern)
        for params in kinds:
            tokens_of(llm, PROMPTS[4:] if params.beam_width else PROMPTS, params)
    counters = llm.engine.memory.counters
    assert min(counters.copied, counters.swapped_in, counters.saved, counters.loaded, counters.hit_tokens) > 0
    assert llm.num_compilations == compiled
