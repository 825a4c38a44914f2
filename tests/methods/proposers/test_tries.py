"""Tries count the runs of texts, and proposers with tries continue a text as earlier texts continued."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.errors import ConfigError
from ksana_jax.methods.proposers.draft_tree import AFTER_TEXT, DraftTree
from ksana_jax.methods.proposers.shared_tries import MAX_SALTS, SharedTries
from ksana_jax.methods.proposers.trie_proposer import TrieMatch
from ksana_jax.methods.proposers.tries import Cursor, Trie
from ksana_jax.scheduler.speculative import read_speculative
from ksana_jax.scheduler.speculative.base import Texts
from ksana_jax.scheduler.step.drafts import Drafts
from tests.methods.proposers.contexts import context_of

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=4)


def runs_of(texts, depth: int) -> collections.Counter:
    """Occurrences in texts of each run of 1 to `depth` tokens."""
    return collections.Counter(
        tuple(text[end - size : end])
        for text in texts
        for end in range(len(text) + 1)
        for size in range(1, depth + 1)
        if size <= end
    )


def contents(trie: Trie) -> dict[tuple[int, ...], int]:
    """The runs of a trie and their counts, by the children that each node has."""
    runs, found = {0: ()}, {}
    for key, node in trie._children.items():
        runs[node] = (*runs[key >> 32], key & 0xFFFFFFFF)
        found[runs[node]] = trie.counts[node]
    return found


def check_best(trie: Trie) -> None:
    found = contents(trie)
    for run in [(), *found]:
        following = {longer: count for longer, count in found.items() if longer[:-1] == run}
        node = trie.find(run)
        children = [(*run, trie.tokens[child]) for child in ([] if node is None else trie.children(node))]
        assert sorted(children) == sorted(following)
        assert (node is not None) == bool(following)
        if node is not None:
            best = trie.best[node]
            assert trie.counts[best] == max(following.values()) == following[(*run, trie.tokens[best])]


@given(TEXTS, st.integers(1, 5))
def test_a_trie_has_each_run_as_often_as_the_texts(texts, depth):
    trie = Trie(depth)
    for text in texts:
        cursor = Cursor(trie)
        cursor.put(text[:7])
        cursor.put(text[7:])
    assert contents(trie) == runs_of(texts, depth) and trie.num_nodes == len(contents(trie))
    check_best(trie)


@given(TEXTS, TEXTS, st.integers(1, 4))
def test_halving_keeps_half_of_each_count_and_texts_go_on_after_it(texts, later, depth):
    trie = Trie(depth)
    cursors = [Cursor(trie) for _ in texts]
    for cursor, text in zip(cursors, texts, strict=True):
        cursor.put(text)
    trie.halve()
    expected = collections.Counter({run: count // 2 for run, count in runs_of(texts, depth).items() if count > 1})
    assert contents(trie) == expected
    check_best(trie)
    for cursor, text in zip(cursors, later, strict=False):
        cursor.put(text)  # as a new text: where the old one was is no longer known
    assert contents(trie) == expected + runs_of(later[: len(cursors)], depth)
    check_best(trie)


def test_shared_tries_stay_within_their_nodes_and_salts_apart():
    shared, rng = SharedTries(4, max_nodes=1024), np.random.default_rng(0)
    for number in range(40):
        shared.cursor(f"salt {number % 3}").put(rng.integers(0, 50, 200).tolist())
        shared.shrink()
        assert shared.num_nodes <= 1024
    for number in range(2 * MAX_SALTS):
        shared.cursor(str(number)).put([number])
    assert shared.num_nodes == MAX_SALTS


def proposed(proposer, text: list[int], most: int, row: int = 0) -> Drafts:
    token_ids = np.zeros((row + 1, 64), np.int32)
    token_ids[row, : len(text)] = text
    lengths = np.full(row + 1, len(text), np.int32)
    return proposer.propose(Texts(token_ids, lengths), np.array([row]), np.array([most]))


def proposals(proposer, text: list[int], most: int, row: int = 0) -> list[int]:
    drafts = proposed(proposer, text, most, row)
    assert not drafts.branches
    return drafts.ids[0, : drafts.counts[0]].tolist()


def proposer_of(method: str, **settings):
    return read_speculative({"method": method, "num_speculative_tokens": 6} | settings).proposer(context_of(4))


BOTH = pytest.mark.parametrize("method", ["trie", "suffix"])


def decoded(proposer, prompt: list[int], output: list[int], salt: str = "", row: int = 1) -> None:
    """A request that generates an output, in a few steps."""
    proposer.begin(row, np.array(prompt, np.int32), len(prompt), salt)
    for length in (1, 3, len(output) - 1):
        proposals(proposer, prompt + output[:length], 0, row)
    proposer.end(row, np.array(prompt + output, np.int32), True)


@BOTH
def test_prompts_are_continued_and_more_frequent_continuations_win(method):
    proposer, prompt = proposer_of(method), [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    proposer.begin(0, np.array(prompt, np.int32), len(prompt), "")
    assert proposals(proposer, prompt, 2)[:1] == [4]
    assert proposals(proposer, prompt, 0) == []


@BOTH
def test_outputs_of_others_are_continued_within_a_salt_alone(method):
    proposer = proposer_of(method, trie_scope="salt")
    decoded(proposer, [7], [11, 12, 13, 14, 15, 16], "a")
    prompt = [20, 11, 12]
    proposer.begin(0, np.array(prompt, np.int32), 3, "a")
    assert proposals(proposer, prompt, 4)[:2] == [13, 14]
    proposer.end(0, np.array(prompt, np.int32), True)
    proposer.begin(0, np.array(prompt, np.int32), 3, "b")
    assert proposals(proposer, prompt, 4) == []


@BOTH
def test_scope_request_learns_from_the_own_text_alone(method):
    proposer = proposer_of(method, trie_scope="request")
    decoded(proposer, [7], [11, 12, 13, 14, 15, 16])
    prompt = [20, 11, 12]
    proposer.begin(0, np.array(prompt, np.int32), 3, "")
    assert proposals(proposer, prompt, 4) == []
    text = [*prompt, 5, 6, 20, 11, 12]
    assert proposals(proposer, text, 2) == [5, 6]


@BOTH
def test_a_text_that_was_preempted_is_not_learnt_twice(method):
    proposer, prompt, output = proposer_of(method), [1, 2], [3, 4, 5]
    proposer.begin(0, np.array(prompt, np.int32), 2, "")
    proposals(proposer, prompt + output[:2], 0)
    proposer.end(0, np.array(prompt + output[:2], np.int32), False)
    proposer.begin(0, np.array(prompt + output[:2], np.int32), 2, "")
    proposer.end(0, np.array(prompt + output, np.int32), True)
    trie = proposer.shared.cursor("").trie
    assert contents(trie)[(3,)] == contents(trie)[(4,)] == contents(trie)[(5,)] == 1


def runs_in(drafts: Drafts) -> set[tuple[int, ...]]:
    """The runs from the text on that a row's tree has."""
    return {tuple(run.tolist()) for run in drafts.runs(0)[1:]}


def test_branches_are_the_most_probable_continuations_within_the_budget():
    proposer = proposer_of("trie", decoding_mode="hier", match_length=2)
    prompt = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    proposer.begin(0, np.array(prompt, np.int32), len(prompt), "")
    # After 1, 2 came 4 twice, then 8 or 9, and 3 once, then 9.
    assert runs_in(proposed(proposer, prompt, 1)) == {(4,)}
    assert runs_in(proposed(proposer, prompt, 3)) == {(4,), (3,), (4, 8)}
    whole = proposed(proposer, prompt, 6)
    assert whole.branches and {(4,), (4, 8), (4, 9), (3,)} < runs_in(whole) and whole.counts[0] == 6


def test_branches_follow_longer_matches_first_and_the_own_text_before_others():
    proposer = proposer_of("trie", decoding_mode="hier", match_length=2)
    for _ in range(5):
        decoded(proposer, [7], [11, 12, 50, 51, 99])
        decoded(proposer, [7], [12, 60, 98, 97, 96])
    prompt = [20, 11, 12]
    proposer.begin(0, np.array(prompt, np.int32), len(prompt), "")
    longest = {(50,), (50, 51), (50, 51, 99)}
    assert runs_in(proposed(proposer, prompt, 3)) == longest
    assert runs_in(proposed(proposer, prompt, 6)) == longest | {(60,), (60, 98), (60, 98, 97)}
    proposer.end(0, np.array(prompt, np.int32), True)
    prompt = [11, 12, 40, 41, 42, 43, 44, 11, 12]
    proposer.begin(0, np.array(prompt, np.int32), len(prompt), "")
    assert {run[0] for run in runs_in(proposed(proposer, prompt, 5))} == {40}


def looked_up(own: TrieMatch, outputs: TrieMatch, newest: list[int], draft: DraftTree) -> None:
    """Drafts of "hier", by looking up each run in each trie, and following each path from its beginning."""
    for start in range(len(newest)):
        for trie in (own.trie, outputs.trie):
            if trie.find(newest[start:]) is None:
                continue
            found, number = [], itertools.count()
            ways: list[tuple[int, list[int], float]] = [(AFTER_TEXT, newest[start:], 1.0)]
            while ways:
                place, run, probability = ways.pop()
                run = run if len(run) < trie.depth else run[len(run) - trie.depth // 2 :]
                if node := trie.find(run):
                    share = probability / (trie.counts[node] + 1)
                    for child in trie.children(node):
                        longer = [*run, trie.tokens[child]]
                        found.append((-share * trie.counts[child], next(number), place, longer))
                if found and not draft.is_full:
                    found.remove(best := min(found))
                    probability, _, place, run = best
                    place = draft.add(place, run[-1])
                    assert place is not None
                    ways.append((place, run, -probability))


def best_looked_up(own: TrieMatch, outputs: TrieMatch, newest: list[int], draft: DraftTree) -> None:
    """Drafts of "one", in the same way."""
    for start in range(len(newest)):
        for trie in (own.trie, outputs.trie):
            if (node := trie.find(newest[start:])) is not None:
                branch = itertools.islice(trie.branch(node, newest[start:]), draft.room)
                return draft.set_run([token for token, _ in branch])
    return None


def suffix_looked_up(own: TrieMatch, outputs: TrieMatch, newest: list[int], draft: DraftTree) -> None:
    """Drafts of `Suffix`, in the same way, with a factor of 1 and probabilities from 0.1 on."""
    best: tuple[float, list[int]] = 0.0, []
    for trie in (own.trie, outputs.trie):
        runs = [newest[start:] for start in range(len(newest)) if trie.find(newest[start:]) is not None]
        for run in runs[:1]:
            node, tokens, probability, expected = trie.find(run), [], 1.0, 0.0
            for token, share in itertools.islice(trie.branch(node or 0, run), min(draft.room, len(run))):
                if (probability := probability * share) < 0.1:
                    break
                tokens.append(token)
                expected += probability
            best = max(best, (expected, tokens), key=lambda found: found[0])
    draft.set_run(best[1])


@pytest.mark.parametrize("scope", ["salt", "request"])
@pytest.mark.parametrize(
    ("setting", "plain"),
    [
        ({"method": "trie", "decoding_mode": "hier", "branch_length": 5, "match_length": 3}, looked_up),
        ({"method": "trie", "branch_length": 5, "match_length": 3}, best_looked_up),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 6}, suffix_looked_up),
    ],
    ids=["hier", "one", "suffix"],
)
@given(seed=st.integers(0, 10**6))
def test_drafts_are_those_of_looking_up_each_run(setting, plain, scope, seed):
    setting, rng = setting | {"trie_scope": scope}, np.random.default_rng(seed)
    both = [proposer_of(**setting), proposer_of(**setting)]
    both[1]._continued = plain
    for proposer in both:
        proposer.shared.max_nodes = 150  # counts are halved now and then
    texts = rng.integers(0, int(rng.integers(2, 9)), (4, 120)).astype(np.int32)
    lengths, starts = np.zeros(4, np.int32), rng.integers(1, 30, 4)
    rows = np.arange(4)
    for _ in range(30):
        for row in np.flatnonzero(lengths == 0).tolist():
            lengths[row] = starts[row] + (rng.integers(0, 4) if rng.random() < 0.3 else 0)  # as after a preemption
            for proposer in both:
                proposer.begin(row, texts[row, : lengths[row]], int(starts[row]), "ab"[row % 2])
        most = rng.integers(0, 7, 4).astype(np.int32)
        got, expected = (proposer.propose(Texts(texts, lengths), rows, most) for proposer in both)
        assert np.array_equal(got.counts, expected.counts)
        for row in range(4):
            same = [run.tolist() for run in got.runs(row)] == [run.tolist() for run in expected.runs(row)]
            assert same, (got.runs(row), expected.runs(row))
        lengths += rng.integers(0, 6, 4).astype(np.int32)
        for row in np.flatnonzero((lengths > 110) | (rng.random(4) < 0.02)).tolist():
            for proposer in both:
                proposer.end(row, texts[row, : lengths[row]], True)
            lengths[row] = 0
            texts[row, :60] = texts[int(rng.integers(4)), 30:90]


def test_a_learnt_text_is_continued():
    proposer = proposer_of("trie")
    proposer.learn(np.array([5, 6, 7, 8, 9]))
    prompt = [1, 5, 6]
    proposer.begin(0, np.array(prompt, np.int32), 3, "")
    assert proposals(proposer, prompt, 3) == [7, 8, 9]


def test_suffix_drafts_as_long_as_it_matches_and_is_probable():
    prompt = [1, 2, 3, 4, 5, 6, 9, 4, 5]
    draft = {}
    for factor in (0.5, 1.0, 2.0):
        proposer = proposer_of("suffix", suffix_decoding_max_spec_factor=factor)
        proposer.begin(0, np.array(prompt, np.int32), len(prompt), "")
        draft[factor] = proposals(proposer, prompt, 6)
    # Two tokens match; the second of them also ends the text, so that half of its texts went on.
    assert draft == {0.5: [6], 1.0: [6, 9], 2.0: [6, 9, 4, 5]}
    sure = proposer_of("suffix", suffix_decoding_min_token_prob=0.9)
    sure.begin(0, np.array(prompt, np.int32), len(prompt), "")
    assert proposals(sure, prompt, 6) == []


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"method": "trie", "match_length": 8}, "match_length is 8, must be an integer from 1 to 7"),
        ({"method": "trie", "max_nodes": 10}, "max_nodes is 10, must be an integer from 1,024"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "must be a number from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "above 0"),
        ({"method": "trie", "decoding_mode": "par"}, "decoding_mode is 'par', must be one of one, hier"),
        ({"method": "jacobi", "num_speculative_tokens": 16}, "take 17 draft tokens with one guess"),
        ({"method": "suffix", "trie_scope": "all"}, "must be one of salt, request"),
    ],
)
def test_bad_settings_are_named(setting, words):
    with pytest.raises(ConfigError, match=words):
        read_speculative({"num_speculative_tokens": 3} | setting)
