"""Prompt lookup: it drafts the earlier continuation of the last few tokens, at the cost of the new tokens alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.errors import ConfigError
from ksana_jax.scheduler.speculative import read_speculative
from ksana_jax.scheduler.speculative.base import Texts
from tests.methods.proposers.contexts import context_of


def method(**settings):
    return read_speculative(ngram(**settings))


def looked_up(text: list[int], low: int, high: int, count: int, latest: bool) -> list[int]:
    """The definition: the longest n-gram at the end of the text with an earlier occurrence, and its continuation."""
    for size in range(high, low - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if len(text) > size and ends:
            draft = text[max(ends) if latest else min(ends) :]
            while len(draft) < count:  # the text repeats itself
                draft = draft + draft
            return draft[:count]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 6),
    st.booleans(),
    st.data(),
)
def test_drafts_are_those_of_the_definition_however_the_text_arrives(text, low, more, count, latest, data):
    settings = {"num_speculative_tokens": count, "match": "latest" if latest else "earliest"}
    proposer = method(prompt_lookup_min=low, prompt_lookup_max=low + more, **settings).proposer(context_of(3))
    token_ids = np.zeros((3, 64), np.int32)
    token_ids[1, : len(text)] = text
    proposer.begin(1, token_ids[1, : len(text)], len(text), "")
    lengths = np.zeros(3, np.int32)
    while lengths[1] < len(text):
        lengths[1] += data.draw(st.integers(1, len(text) - int(lengths[1])))
        ids, counts, *_ = proposer.propose(Texts(token_ids, lengths), np.array([1]), np.array([count]))
        assert ids[0, : counts[0]].tolist() == looked_up(text[: lengths[1]], low, low + more, count, latest)


def test_rows_have_their_own_texts_and_a_new_text_starts_anew():
    proposer = method(prompt_lookup_min=2, prompt_lookup_max=2).proposer(context_of(2))
    token_ids = np.array([[5, 6, 7, 8, 5, 6, 0, 0], [5, 6, 9, 9, 1, 5, 6, 0]], np.int32)
    for row in range(2):
        proposer.begin(row, token_ids[row], 4, "")
    rows, most = np.arange(2), np.array([2, 1])
    ids, counts, *_ = proposer.propose(Texts(token_ids, np.array([6, 7])), rows, most)
    assert counts.tolist() == [2, 1] and ids[0, :2].tolist() == [7, 8] and ids[1, 0] == 9
    proposer.end(0, token_ids[0], True)
    token_ids[0, :2] = 5, 6
    proposer.begin(0, token_ids[0, :2], 2, "")
    assert proposer.propose(Texts(token_ids, np.array([2, 7])), rows, most).counts.tolist() == [0, 1]


def ngram(**settings):
    return {"method": "ngram", "num_speculative_tokens": 4} | settings


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"method": "ngrams"}, "must be one of ngram"),
        ({"num_speculative_tokens": 4}, 'such as {"method": "ngram"'),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "is 0, must be an integer from 1 to 31",
        ),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup": 3}, "the nearest is 'prompt_lookup_m"),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "at most"),
        ({"method": "ngram", "num_speculative_tokens": 4, "match": "first"}, "match is 'first'"),
        (
            ngram(num_speculative_tokens_per_batch_size=[[1, 2, 9]]),
            r"\[1, 2, 9\], must be \[from, to, K\] with K from 0 to 4",
        ),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "num_speculative_tokens_per_batch_size": [[1, 4, 2], [4, 6, 1]],
            },
            "from above 4",
        ),
    ],
)
def test_bad_settings_are_named(setting, words):
    with pytest.raises(ConfigError, match=words):
        read_speculative(setting)


def test_lengths_that_are_not_given_follow_each_other():
    def lengths(**given):
        found = method(**given)
        return found.prompt_lookup_min, found.prompt_lookup_max

    assert lengths() == (5, 5) and lengths(prompt_lookup_max=3) == (3, 3) and lengths(prompt_lookup_min=2) == (2, 2)
