"""Log-likelihoods equal the float64 model's under the engine's pattern, in any batch."""

import numpy as np
import pytest

from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.lab.evaluation import scoring
from ksana_jax.lab.evaluation.scoring import ScoredIds, fitted, groups, max_part_tokens, score, windows
from tests.engine.small import VOCAB, make_llm, model
from tests.reference import reference_logprobs

SINKS = AttentionPattern(window=8, num_sinks=2, sink_position="cache")


@pytest.fixture(scope="module")
def llm():
    return make_llm(max_model_len=64, max_repositioned_sinks=2)


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(2, VOCAB, count).tolist()


def expected(part, pattern=None):
    config, params = model()
    logprobs = reference_logprobs(params, config, part.ids, pattern)
    places = range(len(part.ids) - part.num_scored, len(part.ids))
    total = sum(logprobs[t - 1, part.ids[t]] for t in places)
    return total, all(logprobs[t - 1].argmax() == part.ids[t] for t in places)


@pytest.mark.parametrize("pattern", [None, SINKS], ids=["full", "sinks"])
def test_scores_are_those_of_the_float64_model_under_the_pattern(llm, pattern):
    llm.set_pattern(pattern)
    best = ids(5)
    for _ in range(3):
        config, params = model()
        best.append(int(reference_logprobs(params, config, best, pattern)[-1].argmax()))
    parts = [
        ScoredIds(ids(60, 1), 59),
        ScoredIds(ids(9, 2), 2),
        ScoredIds(ids(3, 3), 0),
        ScoredIds(ids(33, 4), 1),
        ScoredIds(best, 3),
    ]
    found = score(llm, parts)
    for part, (total, greedy) in zip(parts, found, strict=True):
        wanted, best_of_all = expected(part, pattern)
        # float32 against float64, up to 59 tokens in a sum.
        assert total == pytest.approx(wanted, abs=1e-4 * max(part.num_scored, 1)) and greedy == best_of_all
    assert found[4].greedy and not found[0].greedy


def test_the_pattern_acts_on_a_whole_text(llm):
    whole = ScoredIds(ids(60, 1), 59)
    totals = []
    for pattern in (None, SINKS):
        llm.set_pattern(pattern)
        totals.append(score(llm, [whole])[0].logprob)
    assert abs(totals[0] - totals[1]) > 0.1


def test_groups_do_not_change_scores(llm, monkeypatch):
    llm.set_pattern(None)
    parts = [ScoredIds(ids(n, n), n - 1) for n in (5, 20, 11, 2)]
    at_once, counts = score(llm, parts), []
    monkeypatch.setattr(scoring, "GROUP_TOKENS", 16)
    assert score(llm, parts, counts.append) == at_once
    assert counts == [1, 2, 1] or counts == [1, 1, 2]


def test_groups_have_the_longest_first_and_hold_a_limit():
    assert list(groups([3, 9, 0, 4, 2], 6)) == [[1], [3], [0, 4]]
    assert list(groups([0], 6)) == [] == list(groups([], 6))


def test_a_text_that_fits_is_one_part():
    assert list(windows(range(5), 5)) == [ScoredIds(range(5), 4)]
    assert list(windows([7], 5)) == [ScoredIds([7], 0)]


def test_windows_of_a_longer_text_score_each_token_once():
    # The example of the harness: prefix 99 and tokens 0 to 9, at most 4 tokens of input, of which each predicts one.
    found = list(windows([99, *range(10)], 5))
    assert found == [
        ScoredIds([99, 0, 1, 2, 3], 4),
        ScoredIds([3, 4, 5, 6, 7], 4),
        ScoredIds([5, 6, 7, 8, 9], 2),
    ]
    for size in range(2, 12):
        parts = list(windows([99, *range(10)], size))
        assert [t for part in parts for t in part.ids[-part.num_scored :]] == list(range(10))


def test_a_long_context_loses_its_beginning():
    assert fitted([1, 2, 3], [4, 5], 4) == ScoredIds([2, 3, 4, 5], 2)
    assert fitted([1, 2, 3], [4, 5], 9) == ScoredIds([1, 2, 3, 4, 5], 2)
    assert fitted([1, 2, 3], [4, 5], 3) == ScoredIds([3, 4, 5], 2)
    with pytest.raises(ValueError, match=r"a continuation has 2 tokens; .* needs max_model_len 4, which is 3"):
        fitted([1], [4, 5], 2)


def test_the_longest_part_can_be_scored(llm):
    llm.set_pattern(None)
    longest = ScoredIds(ids(max_part_tokens(llm)), 1)
    assert np.isfinite(score(llm, [longest])[0].logprob)
    with pytest.raises(ValueError, match="prompt has 64 tokens, max_model_len is 64"):
        score(llm, [ScoredIds(ids(64), 1)])


def test_eviction_acts_on_scores_or_is_refused(llm):
    whole, method = ScoredIds(ids(60, 1), 59), {"method": "window", "budget": 16, "interval": 1}
    with pytest.raises(ValueError, match="set prompts to 'streamed'"):
        score(make_llm(max_model_len=64, kv_eviction=method), [whole])
    llm.set_pattern(None)
    [full] = score(llm, [whole])
    selection = {"method": "quest", "budget": 32, "full_layers": 0}
    with pytest.raises(ValueError, match="kv_selection with prompts 'whole' selects only after a prompt"):
        score(make_llm(max_model_len=64, kv_selection=selection), [whole])
    [evicted] = score(make_llm(max_model_len=64, kv_eviction=method | {"prompts": "streamed"}), [whole])
    assert abs(evicted.logprob - full.logprob) > 0.1
