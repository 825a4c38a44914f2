"""Requests that can never be served are refused with the numbers; running ones go on, and no block leaks."""

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.request import RequestInput
from tests.engine.small import BOS, Letters, MoreThanRows, assert_idle, make_llm, model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(*token_ids):
    return {"prompt_token_ids": list(token_ids)}


@pytest.fixture(scope="module")
def engine():
    # Two blocks of 16: less than max_model_len 64 needs.
    return make_llm(Letters(), num_blocks=2, max_num_seqs=2)


@pytest.fixture
def llm(engine):
    """An engine with a running request, which must come out as if nothing had happened."""
    alone = engine.generate("x.y", GREEDY)[0].outputs[0]
    request = engine.engine.add_request(np.array(engine.tokenizer.encode("x.y")), GREEDY)
    engine.engine.step()
    held = engine.engine.scheduler.blocks.num_used
    yield engine
    assert engine.engine.scheduler.blocks.num_used == held
    assert len(engine.engine.requests) == 1 and not engine.engine.scheduler.waiting
    while not request.finished:
        engine.engine.step()
    assert request.output().outputs[0] == alone
    assert_idle(engine)


NO_IDS = "prompt_token_ids must be a list of integers"
PROMPTS = {
    "no tokens": (ids(), "prompt is empty"),
    "no tokens in an array": ({"prompt_token_ids": np.array([], np.int32)}, "prompt is empty"),
    "as long as max_model_len": (ids(*[BOS] * 64), "prompt has 64 tokens, max_model_len is 64"),
    "far too long": (ids(*[BOS] * 5000), "prompt has 5,000 tokens, max_model_len is 64"),
    "more than the pool": (ids(*[BOS] * 33), "33 tokens and max_tokens 12 need 3 KV blocks of 16 tokens, .* 2"),
    "more than the pool with its output": (ids(*[BOS] * 22), "prompt of 22 tokens and max_tokens 12 need 3 KV blocks"),
    "an id beyond the vocabulary": (ids(1, 64), "prompt has token id 64, ids go from 0 to 63"),
    "an id far beyond": (ids(1, 2**40), f"prompt has token id {2**40}, ids go from 0 to 63"),
    "an id beyond 64 bits": (ids(1, 2**80), NO_IDS),
    "an id of 64 bits without a sign": ({"prompt_token_ids": np.array([2**63], np.uint64)}, f"token id {2**63}"),
    "a negative id": (ids(5, -7), "prompt has token id -7, ids go from 0 to 63"),
    "fractions": (ids(1, 2.5), "not float64"),
    "NaN": (ids(1, float("nan")), "not float64"),
    "truth values": (ids(True, False), NO_IDS),
    "one truth value": (ids(3, True), NO_IDS),
    "words": (ids("a", "b"), NO_IDS),
    "None among the ids": (ids(1, None), NO_IDS),
    "None for ids": ({"prompt_token_ids": None}, NO_IDS),
    "one id that is no list": ({"prompt_token_ids": 5}, NO_IDS),
    "a text for ids": ({"prompt_token_ids": "abc"}, NO_IDS),
    "ids of two dimensions": ({"prompt_token_ids": [[1, 2]]}, r"not int64 of shape \(1, 2\)"),
    "no ids of two dimensions": ({"prompt_token_ids": [[]]}, NO_IDS),
    "an empty dict": ({}, "prompt has no text"),
    "a salt like those of adapters": ({"prompt": "a", "cache_salt": "lora x\0"}, "must be a string without NUL"),
    "unknown keys": ({"prompt": "a", "text": "b", 7: 1}, "unknown keys 7, text; .*question_token_ids, cache_salt"),
    "a question alone": ({"question": "a"}, "prompt has no text"),
    "a question of no tokens": ({"prompt": "a", "question": ""}, "question is empty: at least one token is needed"),
    "no prompt before a question": (
        {"prompt_token_ids": [], "question_token_ids": [5]},
        "question has 1 of 1 prompt tokens, must leave at least one before it",
    ),
    "a question that is a number": ({"prompt": "a", "question": 5}, "question is a int, must be a string"),
    "fractions in a question": (
        {"prompt": "a", "question_token_ids": [0.5]},
        "question_token_ids must be .* not float",
    ),
    "a text that is a number": ({"prompt": 5}, "prompt is a int, must be a string"),
    "a text that is a number, beside ids": ({"prompt": 5, "prompt_token_ids": [1]}, "prompt is a int"),
    "half of a surrogate pair": ("a\ud800", "half of a surrogate pair at character 1"),
    "a number": ([5.5], "a prompt is a text, a list of token ids or a dict, not float"),
    "None in a list": ([None], "a prompt is a text, a list of token ids or a dict, not NoneType"),
    "ids and a text": ([1, "a"], NO_IDS),
    "None": (None, "prompts is None, must be a text, a list of token ids, a dict, or a list of those"),
    "bytes": (b"abc", "prompts is of type bytes, must be a text"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_that_cannot_be_served_is_refused(llm, name):
    prompt, message = PROMPTS[name]
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY)
    with pytest.raises(ValueError, match=message):
        next(llm.stream(prompt, GREEDY))


@pytest.mark.parametrize("name", [n for n, (prompt, _) in PROMPTS.items() if isinstance(prompt, (str, dict))])
def test_one_bad_prompt_among_good_ones_and_none_is_taken(llm, name):
    prompt, message = PROMPTS[name]
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", prompt, "b"], GREEDY)


SAMPLING = {
    "a bias beyond the vocabulary": ({"logit_bias": {64: 1.0}}, "logit_bias has token id 64, ids go from 0 to 63"),
    "a stop id beyond the vocabulary": ({"stop_token_ids": [3, 99]}, "stop_token_ids has token id 99, ids go from 0"),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_ids_in_sampling_params_are_held_against_the_vocabulary(llm, name):
    given, message = SAMPLING[name]
    with pytest.raises(ValueError, match=message):
        llm.generate("a", SamplingParams(max_tokens=2, **given))


@pytest.mark.parametrize(
    "given", [{"temperature": 0.5}, "greedy", 5, [None], [{"n": 1}], SamplingParams, [GREEDY, 3]], ids=range(7)
)
def test_sampling_params_of_another_type_are_refused(llm, given):
    with pytest.raises(ValueError, match=r"sampling_params (is|has) .*must be a SamplingParams"):
        llm.generate("a", given)


def test_as_many_sampling_params_as_prompts(llm):
    with pytest.raises(ValueError, match="2 prompts and 3 sampling_params were given"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_bad_words_are_encoded_once_for_all_completions_of_a_request(llm, monkeypatch):
    encoded, encode = [], llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **how: encoded.append(text) or encode(text, **how))
    asked = SamplingParams(n=3, max_tokens=2, bad_words=["the"])
    [request] = llm.engine.new_requests([RequestInput(np.array([BOS]), asked)])
    assert encoded == ["the", " the"] and all(c.seq.bad_words for c in request.completions)


def test_an_id_that_is_in_use_is_refused(llm):
    taken = next(iter(llm.engine.requests))
    with pytest.raises(ValueError, match=f"request id '{taken}' is in use"):
        llm.engine.add_request(np.array([BOS]), GREEDY, request_id=taken)


def lose_the_pool(llm, error):
    """A step that fails after it has taken the donated pool along."""

    compile_step = llm.runner.compile_step

    def broken_step(shape):
        def run(*args):
            compile_step(shape)(*args)
            assert llm.runner.cache.kv.is_deleted()
            raise error

        return run

    return "compile_step", broken_step


def fail_to_sample(llm, error):
    def sample(*args):
        raise error

    return "compile_sampler", sample


def fail_to_compile(llm, error):
    def compile_step(shape):
        raise error

    return "compile_step", compile_step


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=["failure", "interrupt"])
@pytest.mark.parametrize("break_", [lose_the_pool, fail_to_sample, fail_to_compile])
def test_after_a_failed_step_the_engine_serves_again(engine, monkeypatch, break_, error):
    expected = [o.outputs[0] for o in engine.generate(["x.y", "a"], GREEDY)]
    other = engine.engine.add_request(np.array([BOS, 5]), GREEDY)
    engine.engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, *break_(engine, error))
        with pytest.raises(type(error)):
            engine.generate(["x.y", "a"], GREEDY)
    assert_idle(engine)
    assert other.finished and other.output().outputs[0].finish_reason == "error"
    assert [o.outputs[0] for o in engine.generate(["x.y", "a"], GREEDY)] == expected
    assert_idle(engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blok_size": 8}, "LLM has no setting 'blok_size'; the nearest is 'block_size'"),
        ({"block_size": 0}, "block_size is 0, must be an integer from 1"),
        ({"max_repositioned_sinks": -1}, "max_repositioned_sinks is -1, must be an integer from 0 or None"),
        ({"dtype": "f64"}, "dtype is 'f64', must be one of f32, bf16, f16, auto"),
        ({"policy": "random"}, "policy is 'random', must be one of fcfs"),
        ({"policy": []}, r"policy is \[\], must be one of fcfs"),
        ({"prefix_replacement": []}, r"prefix_replacement is \[\], must be one of lru"),
        ({"disk_cache_dir": 5}, "disk_cache_dir is 5, must be the path of a folder or None"),
        ({"disk_cache_dir": "a\0b"}, r"disk_cache_dir is 'a\\x00b', must be the path of a folder or None"),
        ({"disk_cache_dir": ""}, "disk_cache_dir is '', must be the path of a folder or None"),
        (
            {"host_cache_bytes": 10**15},
            r"host_cache_bytes is 1,000,000,000,000,000 \(931,322.57 GiB\), this machine has",
        ),
        ({"num_blocks": 10**9}, "1,000,000,000 KV blocks of .* bytes take .* GiB besides .* weights, .* has .* GiB"),
        ({"max_num_seqs": 10**12}, "max_num_seqs is 1,000,000,000,000, must be an integer from 1 to 1,048,576"),
        ({"max_model_len": 10**30}, "max_model_len is 1,000,.*, must be an integer from 1 to 1,073,741,823"),
        (
            {"memory_bytes": 10**15, "max_num_seqs": 10**6, "block_size": 4096},
            "KV blocks of .* bytes take .*: set num_blocks or memory_by",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    config, params = model()
    with pytest.raises(ValueError, match=message):
        LLM.from_params(config, params, **settings)


def test_a_request_named_like_ours_does_not_stand_in_the_way(llm):
    asked = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    last = llm.engine.new_request(np.array([1, 2]), asked).request_id.removeprefix("request-")
    taken = f"request-{int(last) + 2}"
    requests = [llm.engine.add_request(np.array([1, 2]), asked, request_id=taken)]
    requests += [llm.engine.add_request(np.array([1, 2]), asked) for _ in range(2)]
    assert len({r.request_id for r in requests}) == 3
    while not all(r.finished for r in requests):
        llm.engine.step()


def test_only_what_holds_an_id_without_a_row_is_refused():
    llm = make_llm(MoreThanRows(), num_blocks=2, max_num_seqs=2)
    [plain] = llm.generate("x.y", GREEDY)
    with pytest.raises(ValueError, match="prompt has token id 64, ids go from 0 to 63"):
        llm.generate("x.<pic>", GREEDY)
    words = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=["<pic>", "a<pic>"])
    [worded] = llm.generate("x.y", words)  # the model cannot write them
    assert worded.outputs[0].token_ids == plain.outputs[0].token_ids
    assert_idle(llm)
