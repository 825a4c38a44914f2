"""Rules for accepting draft tokens: pure functions of NumPy or jax arrays, under jit too.

A draft has K tokens x_1 .. x_K. The target gives K + 1 distributions, the first after the sequence and each further one
after one more draft token; the draft model gave K, and the draft tokens were drawn from them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any  # NumPy in tests, jax in a compiled program


def equal_sampled(tokens: Array, following: Array) -> Array:
    """Returns which draft tokens [J] equal the model's samples in their places: tokens before the first that does
    not are accepted, see `num_before`.

    The tokens sampled up to there, and the one that differs from the draft, equal plain decoding's: each was drawn
    from the model's distribution after the sequence before it, with the random numbers of its place. The one that
    differs must not be drawn again, or the drafts would bias it.

    Args:
      tokens: [J] sampled after rows' newest tokens and after draft tokens.
      following: [J] the draft token after each of these places; -1 if there is none, as after the last one of a row.
    """
    return (tokens == following) & (following >= 0)


def good_enough(tokens: Array, following: Array, logprobs: Array, rollback: Array) -> Array:
    """Returns which draft tokens [J] the model has chosen, or finds probable enough: those before the first other one
    are accepted.

    Lossy: an accepted token may be another than the model's own. With a threshold of 0 only its own are accepted.

    Args:
      tokens, following: see `equal_sampled`.
      logprobs: [J] log-probabilities of the draft tokens. rollback: the maximum of their negatives.

    Source: Big Little Decoder, Kim et al., arXiv:2302.07863, section 3.2 (rollback).
    """
    return (following >= 0) & ((tokens == following) | (-logprobs <= rollback))


def num_before(usable: Array) -> Array:
    """Returns how many draft tokens [R] come before each row's first that is not usable [R, K + 1]; the last column,
    which no draft token follows, is False."""
    return usable.argmin(axis=1)


def accept_tree(tokens: Array, ids: Array, parents: Array, counts: Array, xp: Any) -> tuple[Array, Array]:
    """Accepts draft tokens that are nodes of trees: from the root on the child that equals what the model has sampled
    after the node, as long as there is one.

    Args:
      tokens: [R, K + 1] sampled after each row's newest token and after each of its draft tokens.
      ids: [R, K] draft tokens. counts: [R] how many of them there are. parents: [R, K], see `Drafts`.

    Returns:
      [R] number of accepted draft tokens; and [R, K + 1] the place among `tokens` of the row's newest token, of the
      first accepted one, and so on. Beyond those accepted it is the place's own number.

    Source: SpecInfer, Miao et al., arXiv:2305.09781, algorithm 2, with the sampled token for its stochastic choice.
    """
    rows, most = ids.shape
    nth, used = xp.arange(most), xp.arange(most) < counts[:, None]
    node = number = xp.zeros(rows, xp.int32)
    path = [node]
    for depth in range(1, most + 1):
        sampled = xp.take_along_axis(tokens, node[:, None], axis=1)
        children = used & (parents == node[:, None] - 1) & (ids == sampled)
        found = children.any(axis=1)
        node = xp.where(found, xp.where(children, nth, most).min(axis=1) + 1, node)
        number = number + found
        path.append(xp.where(found, node, depth))
    return number, xp.stack(path, axis=1)


def rejection_probabilities(p: Array, q: Array, ids: Array, xp: Any) -> Array:
    """Returns the probability [R, K] with which each draft token is accepted, given that those before it are.

    Args:
      p: [R, K + 1, V] distributions of the target, as it samples from them. q: [R, K, V] distributions that the draft
        tokens were drawn from: after temperature, truncation and penalties, or outputs are biased.
      ids: [R, K] draft tokens.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318, algorithm 2.
    """
    drawn_p, drawn_q = (_of_tokens(x, ids, xp) for x in (p[:, :-1], q))
    # A token of probability 0 cannot have been drawn; rounding may say so.
    return xp.where(drawn_p >= drawn_q, 1.0, drawn_p / xp.maximum(drawn_q, xp.finfo(drawn_q.dtype).tiny))


def accept_rejection(p: Array, q: Array, ids: Array, counts: Array, uniforms: Array, xp: Any) -> tuple[Array, Array]:
    """Accepts draft tokens one after the other; outputs have the target's distribution.

    Args:
      p, q, ids: see `rejection_probabilities`. counts: [R] draft tokens of each row.
      uniforms: [R, K] in [0, 1), independent of the drafts.

    Returns:
      The number of accepted draft tokens [R], and the distribution [R, V] of the token after them.
    """
    accepted = (uniforms < rejection_probabilities(p, q, ids, xp)) & (xp.arange(ids.shape[1]) < counts[:, None])
    number = xp.cumprod(accepted.astype(xp.int32), axis=1).sum(axis=1)
    return number, _after(p, q, number, counts, xp.ones(number.shape, p.dtype), xp)


def block_probabilities(p: Array, q: Array, ids: Array, counts: Array, xp: Any) -> tuple[Array, Array]:
    """Returns the probability [R, K] with which the first 1 .. K draft tokens are accepted together, given that no more
    of them are; and the weights P_0 .. P_K [R, K + 1].

    Args:
      p, q, ids, counts: see `accept_rejection`.

    Source: Block verification, Sun et al., arXiv:2403.10444, algorithm 2.
    """
    drawn_p, drawn_q = (_of_tokens(x, ids, xp) for x in (p[:, :-1], q))
    weights = [xp.ones(drawn_p.shape[:1], p.dtype)]
    for i in range(ids.shape[1]):
        ratio = drawn_p[:, i] / xp.maximum(drawn_q[:, i], xp.finfo(drawn_q.dtype).tiny)
        weights.append(xp.minimum(weights[-1] * ratio, 1.0))
    weight = xp.stack(weights, axis=1)
    left = xp.maximum(weight[:, :-1, None] * p[:, :-1] - q, 0.0).sum(axis=2)
    # h_i for the first i < K tokens, and P_K for all of them.
    among = left[:, 1:] / xp.maximum(left[:, 1:] + 1 - weight[:, 1:-1], xp.finfo(p.dtype).tiny)
    among = xp.concatenate([among, weight[:, -1:]], axis=1)
    last = xp.arange(1, ids.shape[1] + 1) == counts[:, None]
    return xp.where(last, weight[:, 1:], among), weight


def accept_block(p: Array, q: Array, ids: Array, counts: Array, uniforms: Array, xp: Any) -> tuple[Array, Array]:
    """Accepts the longest prefix of a draft that keeps the distribution; on average at least as many tokens as
    `accept_rejection`, with the same arguments and results."""
    probabilities, weight = block_probabilities(p, q, ids, counts, xp)
    nth = xp.arange(1, ids.shape[1] + 1)
    accepted = (uniforms < probabilities) & (nth <= counts[:, None])
    number = xp.where(accepted, nth, 0).max(axis=1)
    return number, _after(p, q, number, counts, xp.take_along_axis(weight, number[:, None], axis=1)[:, 0], xp)


# Rules that compare distributions.
RULES = {"rejection": accept_rejection, "block": accept_block}


def rule_of(acceptance: str, samples: bool) -> str:
    """Returns the rule that a program needs for one by which drafts are accepted.

    Args:
      samples: whether there are sampling settings. For greedy rows, rules that compare distributions accept
        the same as "sampled".
    """
    return "sampled" if acceptance in RULES and not samples else acceptance


def _of_tokens(distributions: Array, ids: Array, xp: Any) -> Array:
    """Returns the probabilities [R, K] of tokens [R, K] in distributions [R, K, V]."""
    return xp.take_along_axis(distributions, ids[:, :, None], axis=2)[:, :, 0]


def _after(p: Array, q: Array, number: Array, counts: Array, weight: Array, xp: Any) -> Array:
    """Returns the distribution [R, V] of the token after `number` [R] accepted ones: the
    residual of the target's beyond the draft's, or the target's where all were accepted."""
    at = number[:, None, None]
    target = xp.take_along_axis(p, at, axis=1)[:, 0]
    drafted = xp.take_along_axis(q, xp.minimum(at, q.shape[1] - 1), axis=1)[:, 0]
    left = xp.maximum(weight[:, None] * target - drafted, 0.0)
    total = left.sum(axis=1, keepdims=True)
    # Equal distributions leave nothing, and rounding may reject a token of them.
    usable = (number < counts)[:, None] & (total > 0)
    return xp.where(usable, left / xp.where(total > 0, total, 1.0), target)
