"""The rules of beam search, on toy languages decided by the last token and its place."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.request import FinishReason
from ksana_jax.engine.beam import Beams, advance
from ksana_jax.scheduler.sequence import Sequence
from tests.expected import searched
from tests.fakes import asking


class Toy:
    """The part of a scheduler that `advance` needs; nothing runs in rows."""

    rows = row_blocks = eviction = states = None

    def __init__(self):
        self.forked, self.ended, self.queue, self.parents = [], [], self, []

    def add(self, child):
        assert any(child.token_ids[:-1].tolist() == parent.token_ids.tolist() for parent in self.parents), (
            "the parent has gone on already"
        )
        self.forked.append(child)

    def finish(self, seq, reason):
        assert reason is FinishReason.ABORT and seq not in self.ended
        self.ended.append(seq)


def toy_search(table: np.ndarray, first: int, width: int, penalty: float, stops, max_tokens: int) -> Beams:
    """Runs `Beams` on log-probabilities table[place, last token] [max_tokens, V, V], or [V, V] for all places."""
    table = np.broadcast_to(table, (max_tokens, *table.shape[-2:]))
    ids = itertools.count()

    def new_sequence(token_ids) -> Sequence:
        return Sequence(next(ids), np.asarray(token_ids, np.int32), asking(max_tokens), tuple(stops), 1 + max_tokens)

    scheduler = Toy()
    start = new_sequence([first])
    beams = Beams(width, penalty, tuple(stops), 1 + max_tokens, 1, {start: 0.0})
    everyone = {start}
    for place in range(max_tokens):
        alive = scheduler.parents = list(beams.alive)
        assert 1 <= len(alive) <= width
        for seq in alive:
            row = table[place, seq.token_ids[-1]]
            best = np.argsort(-row)[: beams.num_candidates]
            assert beams.report(seq, best, row[best]) == (seq is alive[-1])
        goes_on = advance(beams, scheduler, new_sequence)
        everyone |= set(scheduler.forked)
        # Everyone who ever was a beam still is one, or was let go once.
        assert set(beams.alive) | set(scheduler.ended) == everyone
        assert not set(beams.alive) & set(scheduler.ended) and goes_on == bool(beams.alive)
        if not goes_on:
            return beams
    raise AssertionError("the search did not end at max_len")


def toy_table(max_tokens: int, vocab: int, seed: int) -> np.ndarray:
    # Each place has its own: or two texts with the same transitions in another order would be equally probable.
    logits = np.random.default_rng((vocab, seed)).normal(0, 1.5, (max_tokens, vocab, vocab))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def expect_hypotheses(found, expected, penalty: float, stops) -> None:
    assert [tuple(h.token_ids) for h in found] == [text for _, text in expected]
    for hypothesis, (total, text) in zip(found, expected, strict=True):
        assert hypothesis.logprob == pytest.approx(total)
        assert hypothesis.score == pytest.approx(total / len(text) ** penalty)
        by_id = text[-1] in stops
        assert hypothesis.finish_reason is (FinishReason.STOP if by_id else FinishReason.LENGTH)
        assert hypothesis.stop_reason == (text[-1] if by_id else None)


@given(
    vocab=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    num_stops=st.integers(0, 2),
    max_tokens=st.integers(1, 9),
)
def test_beams_of_a_toy_language_are_those_of_the_plain_search(vocab, seed, width, penalty, num_stops, max_tokens):
    table, stops = toy_table(max_tokens, vocab, seed), tuple(range(num_stops))
    first = vocab - 1

    def continuations(text):
        return list(enumerate(table[len(text), text[-1] if text else first]))

    beams = toy_search(table, first, width, penalty, stops, max_tokens)
    expect_hypotheses(beams.finished, searched(continuations, width, penalty, stops, max_tokens), penalty, stops)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize(("vocab", "max_tokens"), [(2, 5), (3, 4), (4, 3)])
def test_with_as_many_beams_as_there_are_texts_the_best_of_all_texts_are_found(vocab, max_tokens, penalty):
    """By enumerating all of them: no search at all."""
    for seed in range(5):
        table, first = toy_table(max_tokens, vocab, seed), vocab - 1
        texts = {}
        for length in range(1, max_tokens + 1):
            for text in itertools.product(range(vocab), repeat=length):
                inner, last = text[:-1], text[-1]
                if 0 in inner or not (last == 0 or length == max_tokens):
                    continue
                steps = zip((first, *inner), text, strict=True)
                texts[text] = sum(table[place, a, b] for place, (a, b) in enumerate(steps))
        ranked = sorted(texts.items(), key=lambda item: -item[1] / len(item[0]) ** penalty)
        beams = toy_search(table, first, len(texts), penalty, (0,), max_tokens)
        assert [tuple(h.token_ids) for h in beams.finished] == [text for text, _ in ranked]


def test_a_search_ends_when_no_beam_that_goes_on_is_better_than_the_finished_ones():
    # Token 0 ends. Nearly sure of 0 after anything: both beams of width 2 finish at once or after one step.
    table = np.log(np.array([[0.9, 0.06, 0.04], [0.9, 0.06, 0.04], [0.9, 0.06, 0.04]]))
    beams = toy_search(table, 1, 2, 1.0, (0,), max_tokens=50)
    assert [h.token_ids for h in beams.finished] == [[0], [1, 0]]


def test_beams_are_weighed_at_their_present_length_though_they_might_become_better():
    # Ending at once: ln 0.6 = -0.51. Going on: ln 0.4 = -0.92 now, and -0.92 / 4 with a sure second token.
    table = np.log(np.array([[0.5, 0.5], [0.6, 0.4]]))
    sure = np.log(np.array([[0.5, 0.5], [1e-9, 1 - 1e-9]]))
    beams = toy_search(np.stack([table, sure, sure]), 1, 1, 2.0, (0,), max_tokens=3)
    assert [h.token_ids for h in beams.finished] == [[0]]


def test_a_continuation_that_ends_beyond_the_first_width_is_not_taken():
    # After 2: 1 and 3 before 0. With one beam, 0 is the second best, and never an end.
    table = np.log(np.array([[0.25] * 4, [0.1, 0.6, 0.2, 0.1], [0.3, 0.4, 0.2, 0.1], [0.25] * 4]))
    beams = toy_search(table, 2, 1, 1.0, (0,), max_tokens=3)
    assert [h.token_ids for h in beams.finished] == [[1, 1, 1]]


def test_a_length_penalty_of_zero_favours_the_short_and_a_large_one_the_long():
    # Ending costs ln 0.4 once; going on costs ln 0.6 each time.
    table = np.log(np.array([[0.5, 0.5], [0.4, 0.6]]))
    short = toy_search(table, 1, 3, 0.0, (0,), 6).finished[0]
    long = toy_search(table, 1, 3, 3.0, (0,), 6).finished[0]
    assert short.token_ids == [0] and long.token_ids == [1] * 6
    assert (short.finish_reason, long.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
