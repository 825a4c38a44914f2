"""The end of an output: ids, strings, min_tokens; and that its text is cut there."""

import itertools

import pytest

from ksana_jax import SamplingParams
from tests.engine.small import EOS, complete


def test_a_stop_id_ends_the_output_and_gives_no_text(llm):
    base = complete(llm).token_ids
    stop = base[6]
    at = base.index(stop)
    got = complete(llm, stop_token_ids=[63, stop])
    assert got.token_ids == base[: at + 1]
    assert got.text == llm.tokenizer.decode(base[:at])
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)


def test_the_end_of_sequence_id_ends_the_output_unless_ignored(llm):
    towards_end = {"logit_bias": {EOS: 100.0}}
    got = complete(llm, ignore_eos=False, **towards_end)
    assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == ([EOS], "", "stop", EOS)
    got = complete(llm, ignore_eos=True, max_tokens=5, **towards_end)
    assert (got.token_ids, got.text, got.finish_reason) == ([EOS] * 5, "", "length")
    got = complete(llm, ignore_eos=True, stop_token_ids=[EOS], **towards_end)
    assert (got.token_ids, got.finish_reason) == ([EOS], "stop")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_no_end_before_min_tokens(llm, temperature):
    for stops in ({"ignore_eos": False}, {"ignore_eos": True, "stop_token_ids": [EOS]}):
        got = complete(llm, temperature=temperature, seed=4, min_tokens=3, logit_bias={EOS: 100.0}, **stops)
        assert EOS not in got.token_ids[:3] and got.token_ids[3:] == [EOS]
        assert got.finish_reason == "stop"


def test_a_stop_string_cuts_the_text_wherever_tokens_end(llm):
    base = complete(llm)
    crossing = 0
    for start, length in itertools.product(range(0, 24, 2), (1, 2, 3, 5)):
        stop = base.text[start : start + length]
        if "\ufffd" in stop:  # stands for a byte that the next token may still complete
            continue
        got = complete(llm, stop=stop)
        assert got.text == base.text[: base.text.index(stop)]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        # No token more than it takes to complete the stop string.
        assert got.token_ids == base.token_ids[: len(got.token_ids)]
        assert stop in llm.tokenizer.decode(got.token_ids)
        assert stop not in llm.tokenizer.decode(got.token_ids[:-1])
        crossing += stop not in llm.tokenizer.decode(got.token_ids[-1:])
    assert crossing >= 10


def test_a_stop_string_that_is_a_special_token_ends_the_output_where_the_token_comes(llm):
    forced = {"logit_bias": {EOS: 100.0}, "min_tokens": 3}
    base = complete(llm, max_tokens=3, stop_token_ids=[EOS], **forced)
    assert len(base.token_ids) == 3 and EOS not in base.token_ids
    for more in ({}, {"skip_special_tokens": False}, {"stop": ["~", "</s>"]}):
        got = complete(llm, **{"stop": "</s>", "stop_token_ids": [EOS], "ignore_eos": True} | forced | more)
        assert got.token_ids == [*base.token_ids, EOS] and got.text == base.text
        got = complete(llm, **{"stop": "</s>", "ignore_eos": True, "logit_bias": {EOS: 100.0}} | more)
        assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == ([EOS], "", "stop", "</s>")
    got = complete(llm, stop="</s>", min_tokens=2, logit_bias={EOS: 100.0}, ignore_eos=True)
    assert (got.token_ids, got.text, got.stop_reason) == ([EOS] * 3, "", "</s>")


def test_text_held_back_for_another_stop_string_comes_before_a_special_token(llm):
    base = complete(llm, max_tokens=1)
    forced = {"logit_bias": {EOS: 100.0}, "min_tokens": 1, "stop_token_ids": [EOS], "max_tokens": 4}
    got = complete(llm, stop=[base.text + "~", "</s>"], **forced)
    assert (got.text, got.token_ids[1]) == (base.text, EOS)


def test_a_stop_string_that_can_never_match_is_refused(llm):
    with pytest.raises(ValueError, match="stop has 'a</s>', which is never found: the text leaves '</s>' out"):
        complete(llm, stop=["x", "a</s>"])
    assert complete(llm, stop="a</s>", skip_special_tokens=False, max_tokens=2).finish_reason == "length"
    assert complete(llm, stop="é~日", max_tokens=2).finish_reason == "length"  # no tokens of the vocabulary


def test_what_ended_the_output_is_part_of_it_where_that_is_asked_for(llm):
    base, asked = complete(llm), {"include_stop_str_in_output": True}
    stop = base.text[5:8]
    assert complete(llm, stop=[stop, "~"], **asked).text == base.text[: base.text.index(stop) + 3]
    for more in ({}, {"stop": ["~"]}):  # text at the end, and text as it comes
        ended = complete(llm, stop_token_ids=[base.token_ids[4]], **more, **asked)
        assert ended.text == llm.tokenizer.decode(ended.token_ids) and ended.finish_reason == "stop"
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[base.token_ids[4]], **asked)
    assert [output.outputs[0].text for output in llm.stream("x.y", params)][-1] == ended.text
    forced = {"min_tokens": 2, "max_tokens": 4, "logit_bias": {EOS: 100.0}, "stop": "</s>"}
    assert complete(llm, **forced, **asked).text == complete(llm, **forced).text + "</s>"


def test_of_several_stop_strings_the_earliest_in_the_text_wins(llm):
    base = complete(llm).text
    later, earlier = base[18:21], base[11:14]
    assert base.index(earlier) < base.index(later)
    got = complete(llm, stop=[later, "~", earlier])
    assert (got.text, got.stop_reason) == (base[: base.index(earlier)], earlier)


def test_text_that_only_begins_a_stop_string_is_kept(llm):
    base = complete(llm)
    got = complete(llm, stop=base.text[-2:] + "~")
    assert (got.text, got.token_ids, got.finish_reason) == (base.text, base.token_ids, "length")


def test_a_stop_string_completed_by_the_last_token_is_a_stop(llm):
    base = complete(llm)
    size = next(n for n in range(8, 24) if llm.tokenizer.decode(base.token_ids[n - 1 : n]).isascii())
    text = llm.tokenizer.decode(base.token_ids[:size])
    stop = next(text[i:] for i in range(len(text)) if text.index(text[i:]) == i and i > 2)
    got = complete(llm, stop=stop, max_tokens=size)
    assert (got.text, got.finish_reason, got.stop_reason) == (text[: text.index(stop)], "stop", stop)


def test_stop_strings_before_min_tokens_are_text(llm):
    base = complete(llm)
    first = base.text[0]
    got = complete(llm, stop=first, min_tokens=5)
    early = llm.tokenizer.decode(base.token_ids[:5])
    assert got.text.startswith(early) and first in early
    assert first not in got.text[len(early) :]
    assert len(got.token_ids) > 5
