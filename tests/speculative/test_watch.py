"""Drafts that no step verifies are judged as a step would have judged them."""

import numpy as np
import pytest

from ksana_jax.speculative.watch import Watch
from ksana_jax.step.drafts import Drafts


def follow(drafts: Drafts, row: int, text: list[int]) -> int:
    """How many draft tokens of a row are accepted, by its definition: the longest of its runs that the text has."""
    return max(len(run) for run in drafts.runs(row) if run.tolist() == text[: len(run)])


@pytest.mark.parametrize("trees", [False, True])
def test_as_many_tokens_match_as_a_step_accepts(trees):
    rng, most = np.random.default_rng(0), 31
    for _ in range(40):
        ids, counts = rng.integers(0, 2, (3, most)), rng.integers(0, most + 1, 3)
        parents = np.array([[rng.integers(max(-1, i - 3), i) for i in range(most)] for _ in range(3)])
        drafts = Drafts(ids, counts, parents=parents if trees else None)
        texts = rng.integers(0, 2, (3, most))
        texts[0] = 0 if trees else ids[0]
        assert drafts.matched(texts).tolist() == [follow(drafts, row, texts[row].tolist()) for row in range(3)]


def test_the_length_of_a_tree_is_its_depth_as_far_as_it_goes():
    #  newest - 0 - 1 - 4        a run of a row without branches: 0 - 1 - 2
    #         \ 2 - 3
    parents = np.array([[-1, 0, -1, 2, 1], [-1, 0, 1, 2, 3]])
    drafts = Drafts(np.zeros((2, 5), int), np.array([5, 3]), parents=parents)
    assert drafts.lengths(np.array([1, 4, 5])).tolist() == [[1, 1], [2, 3], [3, 3]]
    assert drafts._replace(parents=None).lengths(np.array([4, 9])).tolist() == [[4, 3], [5, 3]]


def test_drafts_wait_for_their_texts_and_are_forgotten_with_them():
    watch, token_ids, lengths = Watch(3, most=2), np.arange(30).reshape(3, 10), np.array([4, 4, 4])
    drafts = Drafts(np.array([[4, 5], [14, 0], [24, 25]]), np.array([2, 2, 2]))
    watch.add(np.arange(3), lengths, drafts)
    lengths += 1
    assert watch.judged(token_ids, lengths) == []
    watch.end(2)
    lengths += [1, 1, 0]
    [(rows, drafted, accepted)] = watch.judged(token_ids, lengths)
    assert (rows.tolist(), drafted.tolist(), accepted.tolist()) == ([0, 1], [2, 2], [2, 1])
    assert watch.judged(token_ids, lengths) == []
