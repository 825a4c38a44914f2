"""`kept_tokens` against brute force: the tokens that each layer and kv head still has, computed in float64 token by
token, and the literal definition of patterns."""

import functools

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.core.patterns import AttentionPattern
from tests.engine import small
from tests.engine.small import VOCAB, assert_idle, model
from tests.fakes import make_engine
from tests.guessing import ANSWERS
from tests.methods.eviction.defined import METHODS
from tests.methods.eviction.reference import Rule, run
from tests.reference import literal

make_llm = functools.partial(
    small.make_llm, kept_tokens=True, block_size=4, num_blocks=64, max_num_batched_tokens=16, query_tile=8
)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
# Tokens of a prompt differ: equal ones have keys of equal norm in the first layer.
RNG = np.random.default_rng(5)
PROMPTS = [(2 + RNG.permutation(VOCAB - 2)[:length]).tolist() for length in (30, 13, 9)]
CASES = ("h2o", "h2o, pyramid", "snapkv", "keydiff", "streaming_llm", "snapkv, streamed", "kvzip")


@functools.cache
def definition(name: str, text: tuple[int, ...], num_prompt: int):
    """The positions that each layer and head keeps after each token of a text."""
    return run(*reversed(model()), np.array(text), METHODS[name][1](num_prompt), num_prompt)[1]


def expected(name: str | Rule, prompt: list[int], token_ids: list[int], num_question: int = 0) -> np.ndarray:
    """What the last computed token attends to, bool [L, K, tokens]."""
    text = (*prompt, *token_ids[:-1])
    found = np.zeros((2, 2, len(text)), bool)
    if isinstance(name, Rule):
        kept = run(*reversed(model()), np.array(text), name, len(prompt))[1]
    else:
        kept = definition(name, text, len(prompt) - num_question)
    for layer, heads in enumerate(kept[len(text) - 2]):
        for head, positions in enumerate(heads):
            found[layer, head, [*positions, len(text) - 1]] = True
    return found


def check(name: str, outputs, prompts=PROMPTS) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            wanted = expected(name, prompt, completion.token_ids, output.num_question)
            np.testing.assert_array_equal(completion.kept_tokens, wanted)


def serve(llm, params=GREEDY, prompts=PROMPTS):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert_idle(llm)
    return outputs


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_chunked_prompts_keeps_what_the_definition_keeps(name):
    llm = make_llm(kv_eviction=METHODS[name][0])
    outputs = serve(llm)
    check(name, outputs)
    assert not outputs[0].outputs[0].kept_tokens.all()


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_a_prefix_cache_and_preemption_change_nothing(name):
    llm = make_llm(kv_eviction=METHODS[name][0], enable_prefix_caching=True)
    serve(llm)
    check(name, serve(llm))
    assert llm.engine.memory.counters.hit_tokens
    llm = make_llm(kv_eviction=METHODS[name][0])
    requests = [llm.engine.add_request(np.array(prompt), GREEDY) for prompt in PROMPTS]
    number = 0
    while llm.engine.has_work:
        llm.engine.step()
        number += 1
        if number in (5, 11, 17, 23) and len(llm.engine.scheduler.order):
            llm.engine.scheduler._preempt(int(llm.engine.scheduler.order[-1]))
    assert llm.engine.scheduler.num_preemptions > 2
    check(name, [request.output() for request in requests])


def test_hidden_tokens_are_not_kept():
    check("h2o", serve(make_llm(kv_eviction=METHODS["h2o"][0] | {"memory": "simulated"})))


def test_a_stream_tells_it_at_every_token_and_samples_have_their_own():
    llm = make_llm(kv_eviction=METHODS["h2o"][0])
    lengths = []
    for output in llm.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY):
        check("h2o", [output], PROMPTS[:1])
        lengths.append(output.outputs[0].kept_tokens.shape[-1])
    assert lengths == list(range(30, 50))
    sampled = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, detokenize=False)
    [output] = serve(llm, sampled, PROMPTS[:1])
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    check("h2o", [output], PROMPTS[:1])
    [output] = serve(llm, SamplingParams(n=2, max_tokens=1, detokenize=False), PROMPTS[:1])
    assert all(one.kept_tokens.all() and one.kept_tokens.shape[-1] == 30 for one in output.outputs)
    [output] = serve(llm, SamplingParams(beam_width=2, max_tokens=4, detokenize=False), PROMPTS[:1])
    assert output.outputs[0].kept_tokens is None


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("stops", [False, True])
def test_speculation_keeps_the_same(stops, trees):
    """Also where a run of draft tokens goes on after the token that ends the output."""
    setting = {"method": "keydiff", "budget": 16, "interval": 4, "prompts": "streamed"}
    [plain] = serve(make_llm(kv_eviction=setting), prompts=PROMPTS[:1])
    tokens = plain.outputs[0].token_ids
    ANSWERS[np.array(PROMPTS[0], np.int32).tobytes()] = [tokens]
    guesses = {"method": "tests.guessing:Guessing", "num_speculative_tokens": 3, "vocab_size": VOCAB, "trees": trees}
    llm = make_llm(kv_eviction=setting, speculative_config=guesses)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=tokens[11:12] * stops, detokenize=False)
    [output] = serve(llm, params, PROMPTS[:1])
    [found] = output.outputs
    assert output.metrics.num_accepted_tokens > 3 and found.token_ids == tokens[: len(found.token_ids)]
    rule = Rule("unlike the mean", [16, 16], 4, recents=[0] * 2, whole=False)
    np.testing.assert_array_equal(found.kept_tokens, expected(rule, PROMPTS[0], found.token_ids))


def test_patterns_keep_what_they_show():
    patterns = [AttentionPattern(window=7, num_sinks=2), AttentionPattern(window=12, stride=3)]
    for output, prompt in zip(serve(make_llm(pattern=patterns)), PROMPTS, strict=True):
        found = output.outputs[0].kept_tokens
        assert found.shape == (2, 2, len(prompt) + 19)
        for layer, pattern in enumerate(patterns):
            visible, _ = literal(pattern, np.int64(len(prompt) + 18), np.arange(len(prompt) + 19))
            np.testing.assert_array_equal(found[layer], [visible] * 2)
    [output] = serve(make_llm(pattern={"window": 6, "full_heads": [[1], [0]]}), prompts=PROMPTS[:1])
    window, full = np.arange(49) > 42, np.ones(49, bool)
    np.testing.assert_array_equal(output.outputs[0].kept_tokens, [[window, full], [full, window]])


def test_an_engine_that_was_not_asked_tells_nothing_and_one_without_a_model_cannot():
    [output] = serve(make_llm(kept_tokens=False), prompts=PROMPTS[:1])
    assert output.outputs[0].kept_tokens is None
    with pytest.raises(ConfigError, match="kept_tokens needs an engine that computes a model"):
        make_engine(stored={"kept_tokens": True})
