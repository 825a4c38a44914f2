"""SamplingParams: every field out of range is refused, with its name and the range."""

import math

import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.outputs import RequestMetrics
from ksana_jax.core.request import FinishReason

# field: (values at the edges that are taken, values that are refused)
FIELDS = {
    "n": ([1, 128], [0, -1, 129, 1.0]),
    "temperature": ([0, 0.0, 1e-5, 100], [-0.1, 100.1]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 1.5]),
    "top_p": ([1e-9, 1, 1.0], [0, -0.1, 1.1]),
    "min_p": ([0, 1.0], [-0.1, 1.1]),
    "repetition_penalty": ([1e-6, 0.01, 1, 100], [0, 1e-40, 9e-7, -1, 101]),
    "presence_penalty": ([-2, 2.0], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2.0], [-2.1, 2.1]),
    "seed": ([None, 0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0]),
    "min_tokens": ([0, 16], [-1, 17, 2.0]),  # 17 is more than the default max_tokens
    "max_tokens": ([None, 1, 2**31 - 1], [0, -1, 2**31, 2.0]),
    "logprobs": ([None, -1, 0, 20], [-2, 21, 1.0]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21, 1.0]),
}
NUMBERS = [name for name in FIELDS if name not in ("seed", "max_tokens", "logprobs", "prompt_logprobs")]


@pytest.mark.parametrize("name", FIELDS)
def test_values_at_the_edge_of_a_range_are_taken(name):
    for value in FIELDS[name][0]:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name", FIELDS)
def test_values_out_of_range_are_refused_with_the_field_and_the_value(name):
    for value in FIELDS[name][1]:
        with pytest.raises(ValueError, match=rf"^{name} is {value:,}[, ]"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(
    "value", [True, False, math.nan, math.inf, -math.inf, "1", [1], 10**400, 1j], ids=lambda v: repr(v)[:9]
)
def test_what_is_no_finite_number_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*, must be (a number|an integer) from"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_none_is_refused_where_it_means_nothing(name):
    with pytest.raises(ValueError, match=f"^{name} is None, must be"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("name", ["ignore_eos", "detokenize", "skip_special_tokens"])
@pytest.mark.parametrize("value", [0, 1, None, "no"])
def test_switches_take_true_and_false_only(name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value!r}, must be True or False$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "stop has ''"),
        (["a", ""], "stop has ''"),
        (["a"] * 17, "stop has 17 strings, at most 16"),
        ("x" * 257, "1 to 256 characters"),
        ([1], "stop has 1, each must be a string"),
        (5, "stop is 5, must be a string or a list of strings"),
        (b"ab", "stop is b'ab', must be a string"),
        ({"a"}, "stop is {'a'}, must be a string"),
    ],
)
def test_stop_strings_that_cannot_be_are_refused(stop, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(stop=stop)


def test_stop_strings_without_text_are_refused():
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_a_single_stop_string_is_one_string():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")
    assert SamplingParams().stop_strings == ()


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.0], [True], ["1"], [None], 5, 0, {1: 2}, "12"], ids=repr)
def test_stop_ids_that_cannot_be_are_refused(ids):
    with pytest.raises(ValueError, match=r"^stop_token_ids is .*, must be"):
        SamplingParams(stop_token_ids=ids)


def test_stop_ids_are_bounded_by_how_many_differ():
    SamplingParams(stop_token_ids=[*range(1024), 5, 5])
    with pytest.raises(ValueError, match=r"^stop_token_ids has 1,025 different ids, at most 1,024 are supported$"):
        SamplingParams(stop_token_ids=list(range(1025)))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({-1: 1.0}, "logit_bias key is -1"),
        ({"1": 1.0}, "logit_bias key is '1'"),
        ({True: 1.0}, "logit_bias key is True"),
        ({1: 100.5}, r"logit_bias\[1\] is 100.5, must be a number from -100 to 100"),
        ({1: math.nan}, r"logit_bias\[1\] is nan"),
        ({1: None}, r"logit_bias\[1\] is None"),
        ({i: 0.0 for i in range(1025)}, "at most 1024 entries"),
        ([], "must be a dict"),
        ([(1, 2)], "must be a dict"),
    ],
)
def test_biases_that_cannot_be_are_refused(bias, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(logit_bias=bias)


def test_times_are_given_only_where_it_has_come_to_that():
    metrics = RequestMetrics(arrival_s=10.0)
    assert metrics.ttft_s is None and metrics.tpot_s is None
    metrics.first_token_s = 10.5
    assert metrics.ttft_s == 0.5 and metrics.tpot_s is None
    metrics.finished_s, metrics.longest_output = 12.5, 1
    assert metrics.tpot_s is None, "one token has no later ones"
    metrics.longest_output = 5
    assert metrics.tpot_s == 0.5  # 2 s for 4 later tokens


def test_finish_reasons_compare_as_the_words_of_the_openai_api():
    assert [*FinishReason] == ["stop", "length", "abort", "error"]
