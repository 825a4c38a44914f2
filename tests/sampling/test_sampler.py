"""The sampler against an independent reference: which tokens stay, how often each is drawn, what a draw depends on."""

import jax
import numpy as np
import pytest
from scipy.special import chdtrc

from ksana_jax.sampling.probabilities import score
from ksana_jax.sampling.sampler import adjust, sample
from ksana_jax.sampling.truncation import NUM_CANDIDATES, Limits, least_kept
from ksana_jax.sampling.vocabulary import largest
from ksana_jax.scheduler.step.settings import SamplingArrays
from tests.sampling.reference import nucleus_margin, penalised, probabilities, softmax

V = 32
DRAWS = 8192
sample_jit, least_kept_jit = jax.jit(sample), jax.jit(least_kept)


def settings(size: int, **given) -> SamplingArrays:
    """Defaults for `size` rows, one seed each; given values are scalars or [size]."""
    columns = {
        "temperature": np.ones(size, np.float32),
        "top_k": np.zeros(size, np.int32),
        "top_p": np.ones(size, np.float32),
        "min_p": np.zeros(size, np.float32),
        "seeds": np.stack([np.full(size, 7), np.arange(size)], 1).astype(np.uint32),
        "num_outputs": np.zeros(size, np.int32),
        "repetition_penalty": np.ones(size, np.float32),
        "presence_penalty": np.zeros(size, np.float32),
        "frequency_penalty": np.zeros(size, np.float32),
        "forced": np.full(size, -1, np.int32),
    }
    for name, value in given.items():
        columns[name] = np.broadcast_to(value, columns[name].shape).astype(columns[name].dtype)
    return SamplingArrays(**columns)


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def draw(logits_V, **given) -> np.ndarray:
    """DRAWS tokens from the same scores."""
    return np.asarray(sample_jit(np.tile(logits_V, (DRAWS, 1)), settings(DRAWS, **given)))


def kept_tokens(logits_SV, **limits) -> np.ndarray:
    """Whether top-k, top-p and min-p keep each token that is possible: boolean [S, V]."""
    logits_SV = logits_SV.astype(np.float32)
    least = least_kept_jit(logits_SV, logits_SV.max(-1), np.ones(len(logits_SV), np.float32), Limits(**limits))
    return (logits_SV >= np.asarray(least)[:, None]) & np.isfinite(logits_SV)


def chance(tokens, expected_V) -> float:
    """Probability of counts this far from the expected ones or farther (Pearson's chi-square); rare tokens pooled."""
    counts, expected = np.bincount(tokens, minlength=len(expected_V)), expected_V * len(tokens)
    assert not counts[expected_V == 0].any(), "a token was drawn that cannot be"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return chdtrc(len(counts) - 1, ((counts - expected) ** 2 / expected).sum()) if len(counts) > 1 else 1.0


# Seeds are fixed, so this never fails by bad luck; a right sampler would fail once in a thousand choices of seeds.
LEAST_CHANCE = 1e-3


def test_greedy_rows_take_the_most_probable_token():
    logits = random_logits(64, V)
    np.testing.assert_array_equal(sample(logits, None), logits.argmax(-1))
    np.testing.assert_array_equal(sample_jit(logits, settings(64, temperature=0)), logits.argmax(-1))


def test_of_equal_scores_greedy_takes_the_lowest_id():
    logits = np.zeros((4, V), np.float32)
    logits[1, [9, 20]] = 5
    logits[2, :] = -np.inf
    logits[2, [30, 31]] = -3
    logits[3, 5:] = 1e30
    assert np.asarray(sample(logits, None)).tolist() == [0, 9, 30, 5]
    logits = np.tile(logits, (16, 1))  # a size that is compiled already
    assert np.asarray(sample_jit(logits, settings(64, temperature=0))).tolist() == [0, 9, 30, 5] * 16


SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 3": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1, "temperature": 9.0},
    "top_k -1 keeps all": {"top_k": -1},
    "top_k beyond the vocabulary": {"top_k": 2**31 - 1},
    "top_p": {"top_p": 0.7},
    "top_p near 0": {"top_p": 1e-6, "temperature": 9.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0, "temperature": 9.0},
    "top_k and top_p": {"top_k": 8, "top_p": 0.8, "temperature": 2.0},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    "all of them": {"top_k": 12, "top_p": 0.95, "min_p": 0.02, "temperature": 1.7},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(name):
    logits = random_logits(V, seed=3)
    assert chance(draw(logits, **SETTINGS[name]), probabilities(logits, **SETTINGS[name])) > LEAST_CHANCE


def test_the_test_above_would_notice_a_temperature_that_is_a_tenth_off():
    logits = random_logits(V, seed=3)
    assert chance(draw(logits), probabilities(logits, temperature=1.1)) < LEAST_CHANCE


def test_a_row_draws_by_the_same_probabilities_from_step_to_step():
    logits = random_logits(V, seed=4)
    tokens = draw(logits, seeds=[[0, 123]], num_outputs=np.arange(DRAWS))
    assert chance(tokens, probabilities(logits)) > LEAST_CHANCE
    # One draw tells nothing about the next.
    pairs = np.bincount(tokens[:-1] * V + tokens[1:], minlength=V * V).reshape(V, V)
    seen = np.outer(probabilities(logits), probabilities(logits)) * (DRAWS - 1)
    often = seen >= 5
    assert chdtrc(often.sum(), ((pairs - seen)[often] ** 2 / seen[often]).sum()) > LEAST_CHANCE


def test_equal_scores_are_drawn_equally_often():
    logits = np.full(V, -4.0, np.float32)
    logits[[3, 11, 29]] = 2
    tokens = draw(logits, top_k=1)  # those that tie with the last one kept are kept too
    assert chance(tokens, np.where(logits == 2, 1 / 3, 0.0)) > LEAST_CHANCE


def test_truncation_keeps_the_tokens_that_the_definitions_keep():
    rng = np.random.default_rng(1)
    size = 2048
    logits = random_logits(size, V, seed=1, scale=3)
    given = {
        "top_k": rng.choice([-1, 0, 1, 2, 7, V, V + 5], size).astype(np.int32),
        "top_p": rng.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-4], size).astype(np.float32),
        "min_p": rng.choice([0.0, 1e-4, 0.03, 0.3, 1.0], size).astype(np.float32),
    }
    kept = kept_tokens(logits, **given)
    compared = 0
    for row in range(size):
        one = {name: column[row].item() for name, column in given.items()}
        if nucleus_margin(logits[row], **one) < 1e-5:
            continue
        compared += 1
        np.testing.assert_array_equal(kept[row], probabilities(logits[row], **one) > 0, err_msg=str(one))
    assert compared > 0.99 * size


def test_truncation_keeps_what_the_definitions_keep_in_a_large_vocabulary_with_ties_and_impossible_tokens():
    rng = np.random.default_rng(11)
    logits = np.concatenate(
        [
            random_logits(4, 50_000, seed=11),
            random_logits(4, 50_000, seed=12, scale=1e-3),
            np.round(random_logits(4, 50_000, seed=13)),
            np.where(rng.random((4, 50_000)) < 0.9, -np.inf, 1e30),
        ]
    )
    given = {
        "top_k": np.resize([0, 1, 50, 20_000, 40], len(logits)).astype(np.int32),
        "top_p": np.resize([0.9, 1.0, 0.1, 0.5], len(logits)).astype(np.float32),
        "min_p": np.zeros(len(logits), np.float32),
    }
    kept = kept_tokens(logits, **given)
    for row, row_kept in enumerate(kept):
        one = {name: column[row].item() for name, column in given.items()}
        expected = probabilities(logits[row], **one) > 0
        # One token more or less where a sum of 50,000 float32 comes out on the other side of top_p.
        assert abs(int(row_kept.sum()) - int(expected.sum())) <= (one["top_p"] < 1), (row, one)
        assert not (row_kept & ~expected).any() or not (expected & ~row_kept).any()


def test_rows_that_keep_more_tokens_than_are_sorted_keep_those_of_the_definition():
    vocab = 4 * NUM_CANDIDATES
    flat = random_logits(8, vocab, seed=14, scale=0.5)
    tied = np.where(np.arange(vocab) < 2 * NUM_CANDIDATES, 1.0, flat - 9).astype(np.float32)
    logits = np.concatenate([flat, tied, random_logits(4, vocab, seed=15, scale=6)])
    given = {
        "top_k": np.resize([0, NUM_CANDIDATES + 9, 0, NUM_CANDIDATES, 7], len(logits)).astype(np.int32),
        "top_p": np.resize([0.9, 1.0, 0.97, 0.7, 0.5, 0.95], len(logits)).astype(np.float32),
        "min_p": np.zeros(len(logits), np.float32),
    }
    kept = kept_tokens(logits, **given)
    assert (kept.sum(axis=1) > NUM_CANDIDATES).sum() > 8 and (kept.sum(axis=1) < NUM_CANDIDATES).any()
    for row, row_kept in enumerate(kept):
        one = {name: column[row].item() for name, column in given.items()}
        assert nucleus_margin(logits[row], **one) > 1e-5
        np.testing.assert_array_equal(row_kept, probabilities(logits[row], **one) > 0, err_msg=str((row, one)))


def test_truncation_and_noise_are_skipped_where_nobody_asks_for_them():
    here = [eqn.primitive.name for eqn in jax.make_jaxpr(sample)(random_logits(4, V), settings(4)).eqns]
    assert here.count("cond") == 2 and not {"sort", "while", "top_k", "exp"} & set(here)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends sort for top_k")
def test_a_cpu_sorts_no_whole_row():
    program = sample_jit.lower(random_logits(4, 4 * NUM_CANDIDATES), settings(4)).compile().as_text()
    assert 'custom_call_target="TopK"' in program and " sort(" not in program


@pytest.mark.parametrize(("width", "count"), [(2500, 20), (2560, 33), (700, 8), (700, 300), (700, 0)])
def test_the_largest_numbers_of_groups_are_those_of_the_whole_row_and_so_are_their_ids(width, count):
    rng = np.random.default_rng(width + count)
    rows = rng.integers(-40, 40, (6, width)).astype(np.float32)  # many are equal, also at the edge of what is taken
    rows[1] = 0
    rows[2, rng.random(width) < 0.99] = -np.inf
    rows[3, [5, width - 1]] = np.inf
    rows[4] = np.sort(rows[4])
    rows[5, :-count] = rows[5, -1]
    for found, expected in zip(
        jax.jit(largest, static_argnums=1)(rows, count), jax.lax.top_k(rows, count), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("given", [{}, {"top_p": 0.8, "temperature": 1.5}])
def test_tokens_of_several_groups_are_drawn_as_often_as_their_probabilities_say(given):
    logits = random_logits(300, seed=16)
    logits[128:256] -= 40  # a group that is practically impossible
    assert chance(draw(logits, **given), probabilities(logits, **given)) > LEAST_CHANCE


def test_of_equal_scores_in_several_groups_greedy_takes_the_lowest_id():
    logits = random_logits(3, 300, seed=17)
    logits[0, [290, 140, 139]] = logits[1, [299, 5]] = logits[2, [299]] = 50
    assert np.asarray(sample(logits, None)).tolist() == [139, 5, 299]
    assert np.asarray(sample_jit(logits, settings(3, temperature=[0, 0, 1]))).tolist() == [139, 5, 299]


@pytest.mark.parametrize("vocab", [V, 300])
def test_a_draw_depends_on_seed_and_number_of_outputs_alone_not_on_row_or_batch(vocab):
    size = 64
    rng = np.random.default_rng(5)
    logits = random_logits(size, vocab, seed=5)
    given = {
        "temperature": rng.choice([0, 0.7, 1.5], size),
        "top_k": rng.integers(0, 9, size),
        "top_p": rng.uniform(0.5, 1, size),
        "min_p": rng.uniform(0, 0.2, size),
        "seeds": rng.integers(0, 2**32, (size, 2)),
        "num_outputs": rng.integers(0, 99, size),
    }
    together = np.asarray(sample_jit(logits, settings(size, **given)))
    shuffled = rng.permutation(size)
    moved = sample_jit(logits[shuffled], settings(size, **{k: v[shuffled] for k, v in given.items()}))
    np.testing.assert_array_equal(moved, together[shuffled])
    some = np.array([40, 3, 17])
    few = sample_jit(logits[some], settings(3, **{k: v[some] for k, v in given.items()}))
    np.testing.assert_array_equal(few, together[some])


def test_both_words_of_a_seed_and_the_number_of_outputs_matter():
    logits = np.zeros(V, np.float32)
    base = draw(logits, num_outputs=0)
    by_low, by_high = base, draw(logits, seeds=np.stack([np.arange(DRAWS), np.full(DRAWS, 7)], 1))
    by_step = draw(logits, seeds=[[7, 0]], num_outputs=np.arange(DRAWS))
    for tokens in (by_low, by_high, by_step):
        assert chance(tokens, np.full(V, 1 / V)) > LEAST_CHANCE
    for a, b in ((by_low, by_high), (by_low, by_step), (by_high, by_step)):
        assert np.mean(a == b) < 2 / V  # as often as chance has it: 1 / V


def test_impossible_tokens_are_never_drawn():
    logits = random_logits(V, seed=6)
    logits[[0, 5, 31]] = -np.inf
    expected = probabilities(logits, temperature=5.0)
    assert not expected[[0, 5, 31]].any()
    assert chance(draw(logits, temperature=5.0), expected) > LEAST_CHANCE


EXTREMES = {
    "huge scores, small temperature": (1e38, {"temperature": 1e-3, "top_p": 0.5}),
    "smallest temperature that float32 has": (1.0, {"temperature": 1.2e-38, "top_p": 0.9}),
    "temperature that float32 rounds to 0": (1.0, {"temperature": 1e-60}),
    "top_p that float32 rounds to 0": (1.0, {"top_p": 1e-60}),
    "min_p 1": (1.0, {"min_p": 1.0}),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_settings_take_the_best_token(name):
    scale, given = EXTREMES[name]
    logits = random_logits(64, V, seed=8, scale=0.3) * np.float32(scale)
    np.testing.assert_array_equal(sample_jit(logits, settings(64, **given)), logits.argmax(-1))


def test_with_one_possible_token_every_setting_takes_it():
    logits = np.full((64, V), -np.inf, np.float32)
    logits[:, 13] = -1e30
    for given in ({}, {"temperature": 0}, {"top_p": 0.1}, {"top_k": 3}, {"min_p": 0.5}, {"temperature": 100}):
        assert set(np.asarray(sample_jit(logits, settings(64, **given))).tolist()) == {13}


PENALTIES = {
    "none": {},
    "repetition above 1": {"repetition": 1.7},
    "repetition below 1": {"repetition": 0.6},
    "presence": {"presence": 1.5},
    "frequency": {"frequency": 0.4},
    "negative presence and frequency": {"presence": -2.0, "frequency": -0.3},
    "bias": {"bias": {0: 100.0, 3: -100.0, 31: 0.5}},
    "all of them": {"repetition": 1.3, "presence": 0.5, "frequency": 0.25, "bias": {1: 4.0, 2: -4.0}},
}


def dense_settings(rows) -> SamplingArrays:
    """Settings of rows (generated, prompt, penalties)."""
    size = len(rows)
    counts, in_prompt = np.zeros((size, V), np.int32), np.zeros((size, V), bool)
    bias = np.zeros((size, V), np.float32)
    columns = {"repetition": np.ones(size), "presence": np.zeros(size), "frequency": np.zeros(size)}
    for row, (generated, prompt, given) in enumerate(rows):
        counts[row] = np.bincount(generated, minlength=V)
        in_prompt[row, prompt] = True
        for token, value in given.get("bias", {}).items():
            bias[row, token] = value
        for name in columns:
            columns[name][row] = given.get(name, columns[name][row])
    columns = {f"{name}_penalty": column for name, column in columns.items()}
    return settings(size, temperature=0, **columns)._replace(counts=counts, in_prompt=in_prompt, bias=bias)


def test_penalties_and_biases_are_those_of_vllm_and_openai():
    rng = np.random.default_rng(9)
    logits = random_logits(len(PENALTIES), V, seed=9)
    rows = [(rng.integers(0, V, 20), rng.integers(0, V, 10), given) for given in PENALTIES.values()]
    out = np.asarray(adjust(logits, dense_settings(rows)))
    for row, (generated, prompt, given) in enumerate(rows):
        expected = penalised(logits[row], generated.tolist(), prompt.tolist(), **given)
        # Three float32 roundings of scores up to 100.
        np.testing.assert_allclose(out[row], expected, atol=3e-5, err_msg=list(PENALTIES)[row])
    np.testing.assert_array_equal(out[0], logits[0])


def test_a_penalty_counts_prompt_tokens_for_repetition_only():
    logits = np.ones((1, V), np.float32)
    given = {"repetition": 2.0, "presence": 0.25, "frequency": 0.125}
    out = np.asarray(adjust(logits, dense_settings([(np.array([4, 4]), np.array([6]), given)])))[0]
    assert (out[4], out[6], out[0]) == (0.5 - 2 * 0.125 - 0.25, 0.5, 1.0)


def test_penalties_change_what_greedy_and_drawn_rows_take():
    logits = np.zeros((2, V), np.float32)
    logits[:, 8] = 20
    logits[:, 9] = 10
    rows = [(np.array([8]), np.array([], int), {"bias": {8: -15.0}})] * 2
    tokens = sample(logits, dense_settings(rows)._replace(temperature=np.array([0, 0.01], np.float32)))
    assert np.asarray(tokens).tolist() == [9, 9]


def test_log_probabilities_and_ranks_are_those_of_the_softmax():
    logits = random_logits(16, V, seed=10, scale=5)
    tokens = np.random.default_rng(10).integers(0, V, 16).astype(np.int32)
    logprob, rank, top_ids, top_logprobs = (np.asarray(x) for x in score(logits, tokens, 5))
    for row in range(16):
        expected = np.log(softmax(logits[row].astype(np.float64)))
        order = np.argsort(-expected, kind="stable")
        # float32 log-probabilities down to about -30
        np.testing.assert_allclose(logprob[row], expected[tokens[row]], atol=1e-5)
        np.testing.assert_allclose(top_logprobs[row], expected[order[:5]], atol=1e-5)
        assert top_ids[row].tolist() == order[:5].tolist()
        assert rank[row] == 1 + order.tolist().index(tokens[row])


def test_equal_scores_share_the_better_rank():
    logits = np.zeros((3, V), np.float32)
    logits[:, [2, 7]] = 3
    _, rank, top_ids, _ = score(logits, np.array([7, 0, 31], np.int32), 2)
    assert np.asarray(rank).tolist() == [1, 3, 3]
    assert np.asarray(top_ids)[0].tolist() == [2, 7]


def test_log_probabilities_stay_finite_where_scores_are_huge():
    logits = np.full((1, V), -1e30, np.float32)
    logits[0, 3] = 1e30
    logprob, rank, _, top = score(logits, np.array([3], np.int32), 1)
    assert (float(logprob[0]), int(rank[0]), float(top[0, 0])) == (0.0, 1, 0.0)


def test_no_top_tokens_can_be_asked_for():
    logprob, _, top_ids, top_logprobs = score(random_logits(2, V), np.array([1, 2], np.int32), 0)
    assert logprob.shape == (2,) and top_ids.shape == top_logprobs.shape == (2, 0)
