"""Greedy and seeded tokens stay the same when only this changes: batch composition, chunks, blocks, the pool, the
order of arrival, query tiles, rows, policy; and recomputation equals the dense model on the last window."""

import functools

import jax
import numpy as np
import pytest

from ksana_jax import AttentionPattern, SamplingParams
from ksana_jax.engine import recompute
from ksana_jax.models.dense import dense_logits
from tests.engine.small import VOCAB, assert_idle, make_llm, model, tokens_of
from tests.reference import reference_logprobs

RNG = np.random.default_rng(2)
PROMPTS = [{"prompt_token_ids": RNG.integers(2, VOCAB, n)} for n in (1, 3, 15, 16, 17, 30, 9, 33)]
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
PATTERNS = {"full": AttentionPattern(), "sinks": AttentionPattern(window=11, num_sinks=2, sink_position="absolute")}
# What differs from small.SMALL: block_size 16, num_blocks 16, max_num_seqs 4, max_num_batched_tokens 16, query_tile 16.
VARIANTS = {
    "as it is": {},
    "one token a step": {"max_num_batched_tokens": 1},
    "tiles of one token": {"max_num_batched_tokens": 5, "query_tile": 1},
    "chunks of 7 tokens in tiles of 4": {"max_num_batched_tokens": 7, "query_tile": 4},
    "whole prompts": {"max_num_batched_tokens": 128, "query_tile": 64},
    "few small blocks": {"block_size": 4, "num_blocks": 14},
    "more rows than requests": {"max_num_seqs": 10},
    "one step ahead": {"async_scheduling": True},
}
SAMPLED = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **given)
    for given in (
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9},
        {"temperature": 2.0, "seed": 3, "top_k": 5},
        {"temperature": 0},
        {"temperature": 1.5, "seed": 4, "min_p": 0.05},
        {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.9, "seed": -6, "repetition_penalty": 1.3, "logit_bias": {4: 2.0}},
    )
]


@functools.cache
def engine(variant: str):
    return make_llm(**VARIANTS[variant])


@functools.cache
def greedy_alone(pattern: str) -> list[list[int]]:
    """Each request alone, compared with the dense model."""
    llm = engine("as it is")
    llm.set_pattern(PATTERNS[pattern])
    alone = [tokens_of(llm, [p], GREEDY)[0] for p in PROMPTS]
    config, params = model()
    for prompt, tokens in zip(PROMPTS, alone, strict=True):
        ids = prompt["prompt_token_ids"]
        expected = reference_logprobs(params, config, np.concatenate([ids, tokens]), PATTERNS[pattern])
        assert tokens == expected[len(ids) - 1 : -1].argmax(-1).tolist()
    return alone


@functools.cache
def sampled_alone() -> list[list[int]]:
    llm = engine("as it is")
    llm.set_pattern(None)
    return [tokens_of(llm, [p], [s])[0] for p, s in zip(PROMPTS, SAMPLED, strict=True)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_do_not_depend_on_the_batch_or_how_it_is_cut(variant, pattern):
    expected = greedy_alone(pattern)
    llm = engine(variant)
    llm.set_pattern(PATTERNS[pattern])
    llm.clear_records()
    assert tokens_of(llm, PROMPTS, GREEDY) == expected
    # A budget of one token a step is all taken by the first request.
    assert max(r.num_running for r in llm.records) > 1 or variant == "one token a step", "requests did share steps"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_tokens_do_not_depend_on_the_order_of_arrival(pattern):
    expected = greedy_alone(pattern)
    llm = engine("as it is")
    llm.set_pattern(PATTERNS[pattern])
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(PROMPTS))
        assert tokens_of(llm, [PROMPTS[i] for i in order], GREEDY) == [expected[i] for i in order]


def test_greedy_tokens_do_not_depend_on_when_others_arrive_and_leave():
    expected = greedy_alone("full")
    llm = engine("as it is")
    llm.set_pattern(None)
    arrivals = {0: [5], 3: [0, 7], 4: [2], 11: [1, 3], 12: [4], 30: [6]}
    requests, leaves = {}, {}
    for step in range(400):
        for i in arrivals.get(step, ()):
            requests[i] = llm.engine.add_request(PROMPTS[i]["prompt_token_ids"], GREEDY)
            leaves[step + 5] = llm.engine.add_request(PROMPTS[i]["prompt_token_ids"][::-1].copy(), GREEDY)
        if step in leaves:
            llm.engine.abort(leaves[step].request_id)
        llm.engine.step()
    assert [requests[i].output().outputs[0].token_ids for i in range(len(PROMPTS))] == expected
    assert_idle(llm)


@pytest.mark.parametrize("policy", ["fcfs", "shortest_first", "fewest_tokens_left"])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 4), (4, 14)])
def test_greedy_tokens_do_not_depend_on_the_pool_down_to_one_request_at_a_time(block_size, num_blocks, policy):
    # The longest text, 33 + 20 - 1 tokens, needs 4 blocks of 16, or 13 of 4.
    expected = greedy_alone("full")
    llm = make_llm(block_size=block_size, num_blocks=num_blocks, policy=policy)
    assert tokens_of(llm, PROMPTS, GREEDY) == expected
    assert llm.engine.scheduler.num_preemptions > 0
    asked = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    config, params = model()
    outputs = llm.generate(PROMPTS, asked)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    for output, tokens in zip(outputs, expected, strict=True):
        whole = np.array([*output.prompt_token_ids, *tokens])
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        logprobs = reference_logprobs(params, config, whole)
        got = [entry[int(t)].logprob for entry, t in zip(entries, whole[1:], strict=True)]
        np.testing.assert_allclose(got, logprobs[np.arange(len(whole) - 1), whole[1:]], atol=1e-4)


def test_preempted_request_continues_with_the_same_tokens():
    """A pool of one block short of two requests: the later one is preempted."""
    expected = greedy_alone("full")
    llm = make_llm(block_size=4, num_blocks=14)
    order = [7, 6, 5, 4]
    outputs = llm.generate([PROMPTS[i] for i in order], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [expected[i] for i in order]
    assert max(o.metrics.num_preemptions for o in outputs) >= 1
    assert_idle(llm)


def test_seeded_tokens_do_not_depend_on_what_shares_the_batch():
    expected = sampled_alone()
    llm = engine("as it is")
    llm.set_pattern(None)
    assert tokens_of(llm, PROMPTS, SAMPLED) == expected
    order = np.random.default_rng(7).permutation(len(PROMPTS))
    assert tokens_of(llm, [PROMPTS[i] for i in order], [SAMPLED[i] for i in order]) == [expected[i] for i in order]
    # The same seed on another prompt, the same prompt with another seed.
    assert expected[0] != expected[6] and expected[0] != greedy_alone("full")[0]


def test_seeded_tokens_do_not_depend_on_preemption():
    expected = sampled_alone()
    llm = make_llm(block_size=16, num_blocks=4)
    assert tokens_of(llm, PROMPTS, SAMPLED) == expected
    assert llm.engine.scheduler.num_preemptions > 0


WINDOW = 12


@functools.cache
def dense_windows():
    config, _ = model()
    return jax.jit(lambda params, windows: jax.nn.log_softmax(dense_logits(params, windows, config=config)[:, -1]))


def test_recomputed_scores_are_those_of_the_dense_model_on_the_last_window():
    llm = engine("as it is")
    llm.set_pattern(None)
    text = np.random.default_rng(5).integers(2, VOCAB, 40)
    positions = [WINDOW + i for i in (0, 1, 5, 9, 13, 17, 20, 27)]
    got = recompute.score(llm, text, WINDOW, positions)
    _, params = model()
    expected = dense_windows()(params, np.stack([text[t - WINDOW : t] for t in positions]))
    np.testing.assert_allclose(got, np.asarray(expected)[np.arange(8), text[positions]], atol=1e-4)
    # Near the beginning there are fewer tokens than a window.
    logprobs = reference_logprobs(params, model()[0], text[:5])
    got = recompute.score(llm, text, WINDOW, [1, 2, 5])
    np.testing.assert_allclose(got, [logprobs[t - 1, text[t]] for t in (1, 2, 5)], atol=1e-4)
    assert_idle(llm)


def test_recomputed_tokens_are_those_of_the_dense_model_on_the_last_window():
    llm = engine("as it is")
    llm.set_pattern(None)
    text = np.random.default_rng(6).integers(2, VOCAB, 20).tolist()
    got = recompute.generate(llm, text, WINDOW, 8)
    whole = text + got
    windows = np.array([whole[t - WINDOW : t] for t in range(20, 28)])
    assert got == np.asarray(dense_windows()(model()[1], windows)).argmax(-1).tolist()
    cached = tokens_of(llm, [text], GREEDY)[0][:8]
    assert got != cached, "forgetting what is beyond the window changes this text"
