"""Rules of acceptance leave the target's distribution as it is: by enumeration, and by counting samples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.sampling import acceptance
from ksana_jax.sampling.acceptance import (
    accept_block,
    accept_rejection,
    accept_tree,
    equal_sampled,
    good_enough,
    num_before,
)
from ksana_jax.scheduler.step.drafts import Drafts


def tables(rng: np.random.Generator, vocab: int, length: int, sharp: float = 1.0) -> dict[tuple[int, ...], np.ndarray]:
    """A language: the distribution of the next token after each text of up to `length` tokens; some are impossible."""
    found = {}
    for size in range(length + 1):
        for text in itertools.product(range(vocab), repeat=size):
            weights = rng.random(vocab) ** sharp * (rng.random(vocab) < 0.8)
            weights[rng.integers(vocab)] += 0.1
            found[text] = weights / weights.sum()
    return found


def along(table, text: tuple[int, ...], count: int) -> np.ndarray:
    """The distributions [1, count, V] along a text."""
    return np.stack([table[text[:size]] for size in range(count)])[None]


def accepted(usable, tokens: np.ndarray) -> list[int]:
    return num_before(np.asarray(usable)[: tokens.size].reshape(tokens.shape)).tolist()


def test_bild_accepts_up_to_the_first_token_that_is_another_and_too_improbable():
    ids, tokens = np.array([[3, 4, 5]] * 5), np.array([[3, 9, 5, 7]] * 5)
    logprobs, counts = np.array([[-9.0, -2.0, -0.5, 0.0]] * 5).ravel(), np.array([3, 3, 3, 1, 0])
    following, flat = Drafts(ids, counts).flat(20).following, tokens.ravel()
    for rollback, expected in ((0.0, [1, 1, 1, 1, 0]), (2.0, [3, 3, 3, 1, 0]), (1.9, [1, 1, 1, 1, 0])):
        for xp in (np, jnp):
            given = map(xp.asarray, (flat, following, logprobs))
            assert accepted(good_enough(*given, np.float32(rollback)), tokens) == expected
    # Scores that are not finite accept nothing.
    nothing = good_enough(-np.ones_like(flat), following, np.full(20, np.nan), np.float32(5))
    assert accepted(nothing, tokens) == [0] * 5


def rejections(p, q, ids, counts):
    """P(the first 0 .. K draft tokens are accepted, and no more)."""
    h = acceptance.rejection_probabilities(p, q, ids, np)[0]
    return [np.prod(h[:t]) * (1 - h[t] if t < len(h) else 1) for t in range(len(h) + 1)], np.ones(len(h) + 1)


def blocks(p, q, ids, counts):
    h, weight = acceptance.block_probabilities(p, q, ids, counts, np)
    h = np.append(1.0, h[0])
    return [h[t] * np.prod(1 - h[t + 1 :]) for t in range(len(h))], weight[0]


def output_distribution(target, draft, vocab: int, k: int, chances, next_of=None) -> np.ndarray:
    """The distribution [V, ..., V] of the first k + 1 tokens of a text, over all drafts and all acceptances."""
    out = np.zeros((vocab,) * (k + 1))
    for x in itertools.product(range(vocab), repeat=k):
        p, q, ids, counts = along(target, x, k + 1), along(draft, x, k), np.array([x]), np.array([k])
        drawn = np.prod([q[0, i, x[i]] for i in range(k)])
        if not drawn:
            continue
        of_number, weight = chances(p, q, ids, counts)
        assert abs(sum(of_number) - 1) < 1e-12
        for number, chance in enumerate(of_number):
            after = (next_of or acceptance._after)(p, q, np.array([number]), counts, weight[[number]], np)[0]
            for y in range(vocab):
                begin = (*x[:number], y)
                # What comes later is drawn from the target.
                for rest in itertools.product(range(vocab), repeat=k - number):
                    text = (*begin, *rest)
                    later = np.prod([target[text[:i]][text[i]] for i in range(number + 1, k + 1)])
                    out[text] += drawn * chance * after[y] * later
    return out


def expected(target, vocab: int, k: int) -> np.ndarray:
    out = np.zeros((vocab,) * (k + 1))
    for text in itertools.product(range(vocab), repeat=k + 1):
        out[text] = np.prod([target[text[:i]][text[i]] for i in range(k + 1)])
    return out


RULES = pytest.mark.parametrize("chances", [rejections, blocks])


@RULES
@pytest.mark.parametrize("vocab, k", [(3, 1), (3, 2), (2, 3), (4, 2), (8, 1)])
def test_texts_are_distributed_as_those_of_the_target(chances, vocab, k):
    rng = np.random.default_rng(vocab * 10 + k)
    for _ in range(20):
        target, draft = tables(rng, vocab, k), tables(rng, vocab, k, sharp=3.0)
        got = output_distribution(target, draft, vocab, k, chances)
        np.testing.assert_allclose(got, expected(target, vocab, k), atol=1e-12)


@RULES
def test_equal_distributions_accept_all(chances):
    target = tables(np.random.default_rng(1), 3, 2)
    for x in itertools.product(range(3), repeat=2):
        p = along(target, x, 3)
        if np.prod([p[0, i, x[i]] for i in range(2)]):
            of_number, _ = chances(p, p[:, :2], np.array([x]), np.array([2]))
            assert abs(of_number[2] - 1) < 1e-12


def test_blocks_accept_no_fewer_than_rejection():
    rng, gained = np.random.default_rng(3), 0
    for _ in range(50):
        target, draft = tables(rng, 3, 2), tables(rng, 3, 2)
        means = []
        for chances in (rejections, blocks):
            total = 0.0
            for x in itertools.product(range(3), repeat=2):
                p, q = along(target, x, 3), along(draft, x, 2)
                drawn = np.prod([q[0, i, x[i]] for i in range(2)])
                if drawn:
                    total += drawn * np.dot(chances(p, q, np.array([x]), np.array([2]))[0], range(3))
            means.append(total)
        assert means[1] >= means[0] - 1e-12
        gained += means[1] > means[0] + 1e-6
    assert gained > 10


def off(chances, next_of=None, change=lambda p, q: (p, q)) -> float:
    """The largest error of a rule that was changed."""
    rng, worst = np.random.default_rng(5), 0.0
    for _ in range(10):
        target, draft = tables(rng, 3, 2), tables(rng, 3, 2)

        def changed(p, q, ids, counts):
            return chances(*change(p, q), ids, counts)

        got = output_distribution(target, draft, 3, 2, changed, next_of)
        worst = max(worst, np.abs(got - expected(target, 3, 2)).max())
    return worst


@RULES
def test_wrong_rules_are_found(chances):
    assert off(chances) < 1e-12
    # The token that was rejected is drawn again from the whole distribution.
    assert off(chances, lambda p, q, number, *rest: p[:, number[0]]) > 1e-2

    # The difference of distributions is not cut at 0, but its size is taken.
    def sizes(p, q, number, counts, weight, xp):
        if number[0] == counts[0]:
            return p[:, number[0]]
        left = np.abs(weight[0] * p[:, number[0]] - q[:, number[0]])
        return left / left.sum()

    assert off(chances, sizes) > 1e-3

    # The draft's distribution is another than the one drawn from, as before a temperature.
    def cooler(p, q):
        other = q**2
        return p, other / other.sum(axis=2, keepdims=True)

    assert off(chances, change=cooler) > 1e-3


@pytest.mark.parametrize("accept", [accept_rejection, accept_block])
def test_compiled_rules_give_the_target_s_distribution_in_samples(accept):
    vocab, k, num = 4, 2, 60_000
    rng = np.random.default_rng(7)
    target, draft = tables(rng, vocab, k), tables(rng, vocab, k)
    texts = list(itertools.product(range(vocab), repeat=k))
    drawn = [np.prod([along(draft, x, k)[0, i, x[i]] for i in range(k)]) for x in texts]
    picked = rng.choice(len(texts), num, p=np.array(drawn) / sum(drawn))
    ids = np.array(texts)[picked].astype(np.int32)
    p = np.concatenate([along(target, x, k + 1) for x in texts]).astype(np.float32)[picked]
    q = np.concatenate([along(draft, x, k) for x in texts]).astype(np.float32)[picked]
    run = jax.jit(lambda *given: accept(*given, jnp))
    number, after = map(np.asarray, run(p, q, ids, np.full(num, k), rng.random((num, k), np.float32)))
    following = (after.cumsum(axis=1) < rng.random((num, 1)) * after.sum(axis=1, keepdims=True)).sum(axis=1)
    first = np.where(number > 0, ids[:, 0], following)
    # Where nothing was accepted, the second token is the target's next one.
    later = np.array([rng.choice(vocab, p=target[(token,)]) for token in range(vocab) for _ in range(num)])
    second = np.where(number > 1, ids[:, 1], following)
    second = np.where(number > 0, second, later.reshape(vocab, num)[first, np.arange(num)])
    probabilities = expected(target, vocab, 1).ravel()
    counts, used = np.bincount(first * vocab + second, minlength=vocab**2), probabilities > 0
    chi = ((counts - num * probabilities) ** 2)[used] / (num * probabilities[used])
    assert counts[~used].sum() == 0
    assert chi.sum() < 76  # a chi-square of 15 degrees of freedom exceeds it once in 3e9


def test_shorter_drafts_end_where_they_end():
    rng = np.random.default_rng(9)
    p, q = rng.dirichlet(np.ones(5), (3, 4)), rng.dirichlet(np.ones(5), (3, 3))
    ids, counts = rng.integers(0, 5, (3, 3)), np.array([0, 1, 3])
    for accept in (accept_rejection, accept_block):
        number, after = accept(p, q, ids, counts, np.zeros((3, 3)), np)  # accepts whatever can be
        assert (number <= counts).all() and number[2] == 3
        for row in range(3):
            if number[row] == counts[row]:
                np.testing.assert_allclose(after[row], p[row, number[row]])


def test_tokens_that_were_sampled_alike_are_accepted():
    tokens = np.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    ids, counts = np.array([[1, 2]] * 4), np.array([2, 2, 2, 1])
    following = Drafts(ids, counts).flat(16).following  # padded
    assert following.tolist() == [1, 2, -1] * 3 + [1, -1, -1] + [-1] * 4
    flat = np.append(tokens.ravel(), [-1] * 4)  # -1 has no finite score, and equals no draft token
    assert accepted(equal_sampled(flat, following), tokens) == [2, 1, 0, 1]
    assert not equal_sampled(flat, following)[12:].any()


def test_a_tree_is_walked_down_from_the_root():
    # 1 and 5 follow the root, 2 and 3 the token 1, 4 the token 3; the second row's tree ends before its last two nodes.
    ids, parents = np.array([[1, 5, 2, 3, 4]] * 4), np.array([[-1, -1, 0, 0, 3]] * 4)
    counts = np.array([5, 3, 5, 5])
    # Sampled after the newest token and after each of 1, 5, 2, 3, 4.
    tokens = np.array([[1, 3, 0, 0, 4, 9], [1, 3, 0, 0, 4, 9], [5, 3, 7, 0, 4, 9], [8, 3, 0, 0, 4, 9]])
    number, path = accept_tree(tokens, ids, parents, counts, np)
    assert number.tolist() == [3, 1, 1, 0]
    yielded = [tokens[row, path[row, : n + 1]].tolist() for row, n in enumerate(number)]
    assert yielded == [[1, 3, 4, 9], [1, 3], [5, 7], [8]]
    assert path[0].tolist() == [0, 1, 4, 5, 4, 5] and path[3].tolist() == [0, 1, 2, 3, 4, 5]
