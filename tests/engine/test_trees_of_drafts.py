"""Trees of drafts change no token: on the compiled model, whose steps with trees XLA's attention computes."""

import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.errors import ConfigError
from tests.engine.small import EOS, VOCAB, Letters, assert_idle, make_llm
from tests.engine.test_speculative import PARAMS, PROMPTS, answers, counts_of, same
from tests.guessing import Guessing


def planting(guesses: str = "right", count: int = 7, **settings):
    """An engine whose proposer hides the text among other branches; settings of `speculative_config` under drafts."""
    drafts = {"method": "tests.guessing:Guessing", "guesses": guesses, "num_speculative_tokens": count, "trees": True}
    drafts |= {"vocab_size": VOCAB, "stop_ids": (EOS, 63)} | settings.pop("drafts", {})
    return make_llm(Letters(), **({"max_num_batched_tokens": 32, "speculative_config": drafts} | settings))


@pytest.fixture(scope="module")
def plain():
    return make_llm(Letters())


@pytest.fixture(scope="module")
def with_trees():
    return planting()


QUICK = ("greedy", "penalties", "log-probabilities", "several")


@pytest.mark.parametrize(
    "asked",
    [pytest.param(PARAMS[name], id=name, marks=[] if name in QUICK else [pytest.mark.soak]) for name in PARAMS],
)
def test_tokens_text_and_scores_are_those_without_speculation(plain, with_trees, asked):
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | asked)
    expected = answers(plain, PROMPTS, params)
    before = counts_of(with_trees).num_accepted_tokens
    same(with_trees.generate(PROMPTS, params), expected)
    assert_idle(with_trees)
    assert counts_of(with_trees).num_accepted_tokens > before and not counts_of(with_trees).num_failures
    assert any(shape.tree for shape in with_trees.runner.programs if hasattr(shape, "parts"))


@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": [{"window": 4}, {}]},
        {"enable_prefix_caching": True, "block_size": 1, "num_blocks": 256},
        *(
            pytest.param(settings, marks=pytest.mark.soak)
            for settings in (
                {"pattern": {"window": 5}},
                {"pattern": {"preset": "streaming_llm", "window": 14, "num_sinks": 2}},
                {"block_size": 4, "num_blocks": 64, "kv_cache_dtype": "int8"},
                {"num_blocks": 5, "preempt": "recompute"},
                {"kv_cache_dtype": "int4", "kv_full_precision_layers": [1]},
                {"num_blocks": 5, "host_cache_bytes": 1 << 20, "preempt": "swap"},
                {"kv_eviction": {"method": "window", "budget": 16, "interval": 4}},
                {"embedding_device": "host"},
                {"operators": {"attention": "xla"}},
            )
        ),
    ],
    ids=str,
)
def test_settings_of_memory_and_patterns_change_nothing(settings):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain, llm = make_llm(Letters(), **settings), planting(**settings)
    for _ in range(2):  # the second time with cached prefixes, where they are kept
        expected = answers(plain, PROMPTS, params)
        same(llm.generate(PROMPTS, params), expected)
    assert_idle(llm)
    counts = counts_of(llm)
    assert counts.num_accepted_tokens > 30 and counts.num_draft_tokens > counts.num_accepted_tokens + 50


@pytest.mark.parametrize(
    "drafts",
    [
        {"method": "trie", "decoding_mode": "hier"},
        {"method": "jacobi", "window_size": 2, "ngram_size": 3},
    ],
    ids=str,
)
def test_methods_that_branch_change_nothing(plain, drafts):
    llm = make_llm(Letters(), max_num_batched_tokens=32, speculative_config={"num_speculative_tokens": 7} | drafts)
    for asked in (PARAMS["greedy"], PARAMS["sampled"]):
        params = SamplingParams(**{"max_tokens": 30, "ignore_eos": True} | asked)
        same(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
    assert_idle(llm)
    assert counts_of(llm).num_accepted_tokens and not counts_of(llm).num_failures
    assert any(getattr(key, "tree", False) for key in llm.runner.programs)


def test_nothing_is_compiled_after_the_warm_up():
    llm = planting(programs={})
    llm.warm_up(64, [SamplingParams(temperature=1.0, logprobs=1)])
    before = llm.runner.num_compilations
    for count in (1, 3, 4):
        params = SamplingParams(temperature=1.0, seed=2, max_tokens=20, logprobs=1, ignore_eos=True)
        llm.generate(PROMPTS[:count], params)
    assert llm.runner.num_compilations == before and counts_of(llm).num_drafts


def test_goodput_changes_no_token_and_compiles_nothing_after_the_warm_up(plain):
    llm = planting(programs={}, drafts={"adaptive": "goodput"})
    llm.warm_up(64)
    before, params = llm.runner.num_compilations, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for _ in range(3):
        same(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
    assert counts_of(llm).num_drafts and llm.runner.num_compilations == before


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"drafts": {"acceptance": "block"}}, 'branches does not go with speculative_config with acceptance "block"'),
        ({"numerics": "invariant"}, 'branches does not go with numerics "invariant"'),
        ({"tensor_parallel_size": 2}, "branches does not go with tensor_parallel_size 2"),
        ({"kv_cache_dtype": {"k": "kivi2", "v": "kivi2"}}, "does not go with kv_cache_dtype k kivi2"),
        ({"kv_eviction": {"method": "h2o", "budget": 16}}, "does not go with kv_eviction H2O"),
    ],
)
def test_settings_that_trees_would_corrupt_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        planting(**settings)


def test_branches_of_a_method_that_draws_none_are_lost(plain, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected, llm = answers(plain, PROMPTS, params), planting()
    monkeypatch.setattr(Guessing, "draws_trees", False)
    same(llm.generate(PROMPTS, params), expected)
    counts = counts_of(llm)
    assert counts.num_failures and counts.num_failures > counts.num_drafts
