"""Biases of the next token from forbidden and allowed tokens, and the output of an engine that heeds them."""

import re

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.scheduler.step.sampling import bad_word_ids, bias_of
from tests.engine.small import EOS, Letters, complete, make_llm


def bias(output=(), bad_words=(), stop_ids=(), **params):
    made = bias_of(SamplingParams(**params), bad_words, stop_ids, np.array(output, np.int32), 8)
    return made.tolist()


INF = float("inf")
ONLY_LETTERS = {token: 50.0 for token in range(2, 28)}


def test_what_is_added_to_the_scores_of_the_next_token():
    assert bias(logit_bias={3: 2.5}) == [0, 0, 0, 2.5, 0, 0, 0, 0]
    assert bias(allowed_token_ids=[1, 6]) == [-INF, 0, -INF, -INF, -INF, -INF, 0, -INF]
    assert bias(allowed_token_ids=[1], logit_bias={1: -3, 2: 100})[:3] == [-INF, -3, -INF]
    assert bias(min_tokens=2, stop_ids=(0, 7), output=[3]) == [-INF, 0, 0, 0, 0, 0, 0, -INF]
    assert bias(min_tokens=2, stop_ids=(0, 7), output=[3, 3]) == [0] * 8


def test_the_last_token_of_a_bad_word_is_forbidden_where_the_others_have_come():
    words = [(2,), (3, 4), (3, 3, 5)]
    assert bias([], words) == [0, 0, -INF, 0, 0, 0, 0, 0]
    assert bias([3], words) == [0, 0, -INF, 0, -INF, 0, 0, 0]
    assert bias([7, 3, 3], words) == [0, 0, -INF, 0, -INF, -INF, 0, 0]
    assert bias([3, 7], words) == [0, 0, -INF, 0, 0, 0, 0, 0]


def test_bad_words_are_written_at_the_start_of_a_text_and_after_a_space():
    tokenizer = Letters()
    found = bad_word_ids(["the", " xy"], tokenizer)
    assert [b"".join(tokenizer.piece(i).data for i in ids) for ids in found] == [b"the", b" the", b"xy", b" xy"]
    assert bad_word_ids(None, None) == ()


@pytest.fixture(scope="module")
def llm():
    return make_llm(Letters())


def test_only_allowed_ids_come_out_and_what_is_no_longer_asked_for_leaves_no_trace(llm):
    free = complete(llm)
    allowed = sorted(set(free.token_ids))[:3]
    for asked in ({"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}):
        assert set(complete(llm, allowed_token_ids=allowed, **asked).token_ids) <= set(allowed)
    assert complete(llm).token_ids == free.token_ids


def test_a_bad_word_does_not_come_out_and_the_text_up_to_it_is_the_same(llm):
    free = complete(llm, logit_bias=ONLY_LETTERS).token_ids

    # A word that comes up and that the tokenizer writes as the two tokens that made it.
    def word_at(i):
        text = llm.tokenizer.decode(free[i : i + 2])
        return text if llm.tokenizer.encode(text, add_special_tokens=False) == free[i : i + 2] else ""

    at = next(i for i in range(23) if len(word_at(i).strip()) >= 2)
    word = word_at(at)
    got = complete(llm, logit_bias=ONLY_LETTERS, bad_words=[word]).token_ids
    assert got[: at + 1] == free[: at + 1] and got[at + 1] != free[at + 1]
    assert free[at : at + 2] not in [got[i : i + 2] for i in range(23)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is [], must be a list of at least one integer, or None"),
        ({"allowed_token_ids": 5}, "allowed_token_ids is 5, must be a list"),
        ({"allowed_token_ids": [1, -2]}, "allowed_token_ids is -2, must be an integer from 0"),
        ({"allowed_token_ids": [1, 64]}, "allowed_token_ids has token id 64, ids go from 0 to 63"),
        ({"allowed_token_ids": [EOS], "min_tokens": 3, "ignore_eos": False}, "allowed_token_ids leaves no token"),
        ({"allowed_token_ids": [2], "bad_words": ["a"]}, "allowed_token_ids leaves no token: bad_words or min_tokens"),
        ({"bad_words": "the"}, "bad_words is 'the', must be a list of at most 256 strings"),
        ({"bad_words": [" "]}, "bad_words has ' ', each must be a string that is not blank"),
        ({"bad_words": ["the"], "beam_width": 2}, "beam_width 2 does not go with penalties, logit_bias, bad_words or"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens is 'no', must be True or False"),
    ],
)
def test_what_cannot_be_is_refused(llm, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        complete(llm, **given)


def test_bad_words_need_a_tokenizer():
    with pytest.raises(ValueError, match="no tokenizer, which bad_words need; logit_bias takes token ids"):
        complete(make_llm(), {"prompt_token_ids": [5]}, bad_words=["a"], detokenize=False)


def test_special_tokens_are_in_the_text_where_they_are_not_skipped(llm):
    bos = {0: 100}
    assert complete(llm, logit_bias=bos, max_tokens=2).text == ""
    assert complete(llm, logit_bias=bos, max_tokens=2, skip_special_tokens=False).text == "<s><s>"


def test_output_without_max_tokens_goes_on_to_max_model_len(llm):
    [output] = llm.generate("x.y", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    total = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    assert total == llm.engine.max_model_len and output.outputs[0].finish_reason == "length"


def test_the_cumulative_logprob_is_the_sum_over_the_tokens(llm):
    got = complete(llm, logprobs=2)
    chosen = [entry[token].logprob for entry, token in zip(got.logprobs or [], got.token_ids, strict=True)]
    assert got.cumulative_logprob == pytest.approx(sum(chosen), rel=1e-12) and sum(chosen) < -1
    assert complete(llm).cumulative_logprob is None
