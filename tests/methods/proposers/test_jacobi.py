"""Lookahead decoding: n-grams come true although no text has had them."""

import numpy as np
import pytest

from ksana_jax.methods.proposers.jacobi import NGramPool
from ksana_jax.sampling.acceptance import accept_tree
from ksana_jax.scheduler.speculative import read_speculative
from ksana_jax.scheduler.speculative.base import Texts
from tests.methods.proposers.contexts import context_of


def follows(token):
    """A model that looks at the newest token alone."""
    return (5 * token + 3) % 64


def decoded(num_tokens: int, **settings) -> tuple[list[int], int]:
    """A text that `follows` continues, with drafts; and the number of steps."""
    method = read_speculative({"method": "jacobi", "num_speculative_tokens": 31} | settings)
    assert method is not None and method.draws_trees
    proposer, prompt = method.proposer(context_of(1)), [1, 2, 50]
    text, row, steps = list(prompt), np.array([0]), 0
    proposer.begin(0, np.array(prompt, np.int32), len(prompt), "")
    while len(text) < num_tokens:
        texts = Texts(np.array([text], np.int32), np.array([len(text)], np.int32))
        drafts = proposer.propose(texts, row, np.array([31]))
        sampled = follows(np.append(text[-1], drafts.ids[0]))[None]
        number, path = accept_tree(sampled, drafts.ids, drafts.parents, drafts.counts, np)
        proposer.observe(row, drafts._replace(sampled=sampled))
        text += sampled[0, path[0, : int(number[0]) + 1]].tolist()
        steps += 1
    return text, steps


@pytest.mark.parametrize("window, size", [(5, 4), (7, 3), (8, 2)])
def test_steps_yield_several_tokens_of_a_text_that_has_not_had_them(window, size):
    text, steps = decoded(50, window_size=window, ngram_size=size)
    assert all(text[i + 1] == follows(text[i]) for i in range(2, len(text) - 1))
    assert len(set(text[2:44])) == 42, "the text repeats itself, so that there is no need to look ahead"
    assert steps < 40 < len(text) - 3


def test_a_larger_window_takes_fewer_steps():
    steps = [decoded(40, window_size=window, ngram_size=4, guess_set_size=2)[1] for window in (1, 3, 6)]
    assert steps[0] > steps[1] > steps[2]


def test_a_pool_keeps_the_last_ngrams_of_a_token():
    pool = NGramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 1, 1)):
        pool.put(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)] and pool.after(2) == [(1, 1)] and pool.after(3) == []
