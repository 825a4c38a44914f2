"""Speculation changes no token: on the compiled model, for right and for wrong guesses."""

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.settings import check_policies
from ksana_jax.scheduler.speculative.speculation import SpeculationCounts
from tests.engine.small import EOS, VOCAB, Letters, assert_idle, complete, make_llm
from tests.guessing import ANSWERS, GUESSES
from tests.machine import native_products

PROMPTS = ["x.y", "the cat and the cat and the", "abcabcabcab", "in her hat the man in her"]


def guessing(guesses: str, count: int = 5, adaptive: str = "off", **settings):
    config = {"method": "tests.guessing:Guessing", "guesses": guesses, "num_speculative_tokens": count}
    config["adaptive"] = adaptive
    return make_llm(Letters(), speculative_config=config | {"vocab_size": VOCAB, "stop_ids": (EOS, 63)}, **settings)


def counts_of(llm) -> SpeculationCounts:
    """The engine's counts of drafts."""
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    return speculation.counts


def answers(llm, prompts, params):
    """Outputs of a plain engine, which proposers of tests may then know."""
    ANSWERS.clear()
    outputs = llm.generate(prompts, params)
    for output in outputs:
        prompt = np.array(output.prompt_token_ids, np.int32).tobytes()
        ANSWERS.setdefault(prompt, []).extend(c.token_ids for c in output.outputs)
    return outputs


def same(got, expected) -> None:
    for one, two in zip(got, expected, strict=True):
        assert len(one.outputs) == len(two.outputs)
        for a, b in zip(one.outputs, two.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
                b.token_ids,
                b.text,
                b.finish_reason,
                b.stop_reason,
            )
            for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert x.keys() == y.keys()
                # Other shapes of the step add in another order: about 1e-6 in float32.
                np.testing.assert_allclose([p.logprob for p in x.values()], [p.logprob for p in y.values()], atol=1e-4)


PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 3},
    "top p": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 4},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "counted": {"temperature": 0, "frequency_penalty": 0.8},
    "bias": {"temperature": 0, "logit_bias": {7: 2.5, 63: 1.0}, "bad_words": ["the"]},
    "log-probabilities": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    "several": {"temperature": 1.0, "seed": 6, "n": 3},
    "at least": {"temperature": 0, "min_tokens": 9, "stop_token_ids": [7, 9, 11, 20], "ignore_eos": False},
    "ends": {"temperature": 1.0, "seed": 8, "stop_token_ids": [7, 9, 11, 20], "ignore_eos": False},
}


@pytest.fixture(scope="module")
def plain():
    return make_llm(Letters())


@pytest.fixture(scope="module", params=("right", "right at first", "random"))
def speculating(request):
    return guessing(request.param)


@pytest.mark.parametrize("asked", PARAMS.values(), ids=PARAMS)
def test_tokens_text_and_scores_are_those_without_speculation(plain, speculating, asked):
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | asked)
    expected = answers(plain, PROMPTS, params)
    same(speculating.generate(PROMPTS, params), expected)
    assert_idle(speculating)
    counts = counts_of(speculating)
    assert counts.num_draft_tokens and not counts.num_failures


def test_a_stop_string_anywhere_in_a_run_cuts_text_and_tokens_there(plain):
    base = complete(plain)
    llm = guessing("right", 7)
    for start in range(0, 22):
        stop = base.text[start : start + 2]
        if "\ufffd" in stop:
            continue
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        answers(plain, ["x.y"], params)
        expected, got = complete(plain, stop=stop), complete(llm, stop=stop)
        same([_Output([got])], [_Output([expected])])
        assert llm.engine.records[-1].num_waiting == 0
    [output] = llm.generate("x.y", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=base.text[9:11]))
    assert output.metrics.num_output_tokens == len(output.outputs[0].token_ids)
    assert counts_of(llm).num_accepted_tokens > 50
    assert_idle(llm)


class _Output:
    def __init__(self, outputs):
        self.outputs = outputs


@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": {"window": 16}},
        {"pattern": {"preset": "streaming_llm", "window": 14, "num_sinks": 2}},
        {"block_size": 4, "num_blocks": 64},
        {"block_size": 1, "num_blocks": 256},
        {"kv_cache_dtype": "int8"},
        {"num_blocks": 5, "preempt": "recompute"},
        {"num_blocks": 5, "host_cache_bytes": 1 << 20, "preempt": "swap"},
        {"enable_prefix_caching": True},
        {"kv_eviction": {"method": "window", "budget": 16, "interval": 4}},
        {"embedding_device": "host"},
        pytest.param(
            {"numerics": "invariant"},
            marks=[native_products, pytest.mark.cpu("invariant numerics need native operators")],
        ),
    ],
    ids=lambda settings: " ".join(map(str, settings.items())),
)
@pytest.mark.parametrize("guesses", ["right at first", "random"])
def test_settings_of_memory_and_patterns_change_nothing(settings, guesses):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain, llm = make_llm(Letters(), **settings), guessing(guesses, **settings)
    for _ in range(2):  # the second time with cached prefixes, where they are kept
        expected = answers(plain, PROMPTS, params)
        same(llm.generate(PROMPTS, params), expected)
    assert_idle(llm)
    assert counts_of(llm).num_draft_tokens > 100


def test_a_proposer_that_fails_costs_its_drafts_alone(plain, caplog):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = answers(plain, PROMPTS, params)
    for guesses in ("raises", "nonsense"):
        llm = guessing(guesses)
        same(llm.generate(PROMPTS, params), expected)
        assert counts_of(llm).num_failures
        assert "the proposer failed" in caplog.text
    assert set(GUESSES) > {"raises", "nonsense"}


def test_accepted_drafts_spare_steps(plain):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected, llm = answers(plain, ["x.y"], params), guessing("right", 5)
    same(llm.generate(["x.y"], params), expected)
    # Steps of 16 tokens hold 3 draft tokens for each of 4 rows. The prompt's yields one token, each other one four.
    assert len(llm.engine.records) == 7
    counts = counts_of(llm)
    assert counts.num_drafts == 6 and counts.num_accepted_tokens == 23 - 6 == counts.accepted_per_pos.sum()


def test_each_request_and_each_step_counts_its_drafts(plain):
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=20, ignore_eos=True)
    answers(plain, PROMPTS, params)
    llm = guessing("right at first", 5)
    metrics, counts = [output.metrics for output in llm.generate(PROMPTS, params)], counts_of(llm)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        of_requests = [getattr(m, name) for m in metrics]
        assert min(of_requests) > 0 and sum(of_requests) == getattr(counts, name)
        if name != "num_drafts":
            assert sum(getattr(record, name) for record in llm.engine.records) == getattr(counts, name)
    assert all((m.mean_acceptance_length or 0) > 1 for m in metrics)
    assert sum(record.num_chunk_tokens for record in llm.engine.records) < sum(m.num_output_tokens for m in metrics)


def test_nothing_is_compiled_after_the_warm_up():
    llm = guessing("right at first", 5)
    llm.warm_up(64, [SamplingParams(temperature=1.0, logprobs=1)])
    before = llm.runner.num_compilations
    for count in (1, 2, 3, 4):
        llm.generate(
            PROMPTS[:count], SamplingParams(temperature=1.0, seed=2, max_tokens=20, logprobs=1, ignore_eos=True)
        )
    assert llm.runner.num_compilations == before


def test_goodput_chooses_by_the_time_of_steps_and_changes_no_token(plain, monkeypatch):
    """On a clock of the test, by which a step with drafts takes as long as a plain one, or ten times as long."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected, drafted = answers(plain, PROMPTS[:1], params), {}
    for factor in (1, 10):
        llm = guessing("right", 5, adaptive="goodput")
        speculation, now = llm.engine.scheduler.speculation, [1.0]
        assert speculation is not None
        observe = speculation.observe_step

        def timed(shape, began_s, ended_s, observe=observe, now=now, factor=factor):
            began = now[0]
            now[0] += 1e-3 * (factor if shape is not None and shape.parts[0].width > 1 else 1)
            observe(shape, began, now[0])

        monkeypatch.setattr(speculation, "observe_step", timed)
        for _ in range(12):
            same(llm.generate(PROMPTS[:1], params), expected)
        before = counts_of(llm).num_drafts
        for _ in range(8):
            same(llm.generate(PROMPTS[:1], params), expected)
        drafted[factor] = counts_of(llm).num_drafts - before
        assert_idle(llm)
    assert drafted[1] > 8 * 8 and 0 <= drafted[10] < 16


def test_goodput_compiles_nothing_after_the_warm_up():
    llm = guessing("right", 5, adaptive="goodput")
    llm.warm_up(64)
    compiled, params = llm.runner.num_compilations, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for _ in range(6):
        llm.generate(PROMPTS, params)
    assert llm.runner.num_compilations == compiled and counts_of(llm).num_drafts


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"kv_cache_dtype": {"k": "kivi2", "v": "kivi2"}},
            "does not go with kv_cache_dtype k kivi2",
        ),
        ({"kv_eviction": {"method": "h2o", "budget": 16}}, "does not go with kv_eviction H2O"),
        (
            {"max_num_batched_tokens": 4},
            "5 draft tokens and one more do not fit into a step of max_num",
        ),
    ],
)
def test_settings_that_drafts_would_corrupt_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        guessing("right", **settings)


def test_rules_that_compare_distributions_are_for_one_device():
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": "block"}
    with pytest.raises(ConfigError, match='acceptance "block" does not go with tensor_parallel_size 2'):
        check_policies(EngineConfig(tensor_parallel_size=2, speculative_config=drafts))
    check_policies(EngineConfig(tensor_parallel_size=2, speculative_config=drafts | {"acceptance": "sampled"}))
