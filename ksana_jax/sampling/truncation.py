"""Finds the least score that top-k, top-p and min-p keep, by a partial sort. Knows no seeds, no tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ksana_jax.sampling.sums import running_sum, sum_by_halves
from ksana_jax.sampling.vocabulary import WHOLE, Vocabulary

# Scores of each row that are sorted. On a CPU (32 rows of 131,072) that takes 10 ms for 256 and 35 ms for 1,024.
NUM_CANDIDATES = 256


class Limits(NamedTuple):
    """Limits on the tokens that can be drawn, [S] each.

    top_k: below 1 keeps all. top_p: in (0, 1]; keeps the smallest set that reaches this probability. min_p: minimum
    probability relative to the best token's.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    def exclude(self, vocab: int) -> jax.Array:
        """Returns whether they can exclude any of `vocab` tokens: [S]."""
        return ((self.top_k > 0) & (self.top_k < vocab)) | (self.top_p < 1.0) | (self.min_p > 0)


def least_kept(
    logits_SV: jax.Array, best: jax.Array, temperature: jax.Array, limits: Limits, vocabulary: Vocabulary = WHOLE
) -> jax.Array:
    """Returns the score [S] at or above which tokens are kept.

    Args:
      best: [S] best score. temperature: [S], above 0: probabilities are the softmax of scores / temperature.
      vocabulary: maps this device's scores to the whole vocabulary.

    Tokens that tie with the last one kept are kept too. Source: nucleus sampling, arXiv:1904.09751; min-p,
    arXiv:2407.01082.

    The best scores of each row are sorted. A row that keeps more than these is searched by bisection.
    """
    vocab = vocabulary.size(logits_SV)
    k = jnp.where(limits.top_k < 1, vocab, jnp.minimum(limits.top_k, vocab))

    def weigh(scores: jax.Array) -> jax.Array:
        # Relative to the best score, so that a small temperature cannot overflow.
        return jnp.exp((scores - best[:, None]) / temperature[:, None])

    floor, settled = _among_best(logits_SV, weigh, k, limits.top_p, vocabulary)
    floor = vocabulary.features.either(
        jnp.all(settled),
        lambda _: floor,
        lambda logits: jnp.where(settled, floor, _by_bisection(logits, weigh, k, limits.top_p, vocabulary)),
        logits_SV,
    )
    log_min_p = jnp.where(limits.min_p > 0, jnp.log(jnp.maximum(limits.min_p, 1e-38)), -jnp.inf)
    # The best token stays, even if rounding with a min_p of 1 would exclude it.
    return jnp.minimum(jnp.maximum(floor, best + temperature * log_min_p), best)


Weigh: TypeAlias = Callable[[jax.Array], jax.Array]


def _among_best(
    logits_SV: jax.Array, weigh: Weigh, k: jax.Array, top_p: jax.Array, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array]:
    """Finds the least score [S] that top-k and top-p keep among the best scores; returns it, and whether [S] the row
    keeps no others."""
    vocab = vocabulary.size(logits_SV)
    most = min(NUM_CANDIDATES, vocab)
    candidates = vocabulary.top(logits_SV, most)[0]
    # Not candidates[:, -1]: with a second slice of it, XLA no longer takes the sort for a partial one.
    last = jnp.min(candidates, axis=-1)
    by_k = jnp.take_along_axis(candidates, jnp.minimum(k, most)[:, None] - 1, axis=-1, mode="clip")[:, 0]
    floor_k = jnp.where(k < vocab, by_k, -jnp.inf)
    sums = running_sum(jnp.where(candidates >= floor_k[:, None], weigh(candidates), 0.0))
    # top_p applies to the tokens that top_k has kept.
    total = jnp.where(k < vocab, sums[:, -1], vocabulary.sum(sum_by_halves(weigh(logits_SV))))
    reached = sums >= (top_p * total)[:, None]
    floor_p = jnp.take_along_axis(candidates, jnp.argmax(reached, axis=-1)[:, None], axis=-1, mode="clip")[:, 0]
    nucleus = top_p < 1.0
    # Tokens that tie with the k-th may not all be among the candidates.
    knows_total = (k == vocab) | (most == vocab) | (last < floor_k)
    settled = jnp.where(nucleus, knows_total & jnp.any(reached, axis=-1), (k == vocab) | (k <= most))
    return jnp.maximum(floor_k, jnp.where(nucleus, floor_p, -jnp.inf)), settled


def _by_bisection(
    logits_SV: jax.Array, weigh: Weigh, k: jax.Array, top_p: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """Finds the least score [S] that top-k and top-p keep among all scores."""
    floor_k = _highest(logits_SV, jnp.ones_like, k, k < vocabulary.size(logits_SV), vocabulary)

    def weigh_kept(scores: jax.Array) -> jax.Array:
        return jnp.where(scores >= floor_k[:, None], weigh(scores), 0.0)

    total = vocabulary.sum(sum_by_halves(weigh_kept(logits_SV)))
    floor_p = _highest(logits_SV, weigh_kept, top_p * total, top_p < 1.0, vocabulary)
    return jnp.maximum(floor_k, floor_p)


def _highest(
    logits_SV: jax.Array, weigh: Weigh, wanted: jax.Array, active: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """Finds the highest score [S] such that the weights of scores at or above it reach `wanted`, by bisection.

    Args:
      weigh: scores [S, V] -> their weights [S, V], not negative.
      wanted: [S] sums of weights. active: [S]; other rows get -inf.

    At most 32 passes: halves the numbers that float32 has between the least and the best score.
    """

    def enough(low: jax.Array) -> jax.Array:
        weights = jnp.where(logits_SV >= _score(low)[:, None], weigh(logits_SV), 0.0)
        return vocabulary.sum(sum_by_halves(weights)) >= wanted

    def halve(bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        found = enough(middle)
        return jnp.where(found, middle, low), jnp.where(found, high, middle)

    # Scores at or above `low` reach `wanted`, those at or above `high` do not.
    low = jnp.where(active, _key(vocabulary.min(jnp.min(logits_SV, axis=-1))), 0)
    high = jnp.where(active, _key(vocabulary.max(jnp.max(logits_SV, axis=-1))) + 1, 0)
    low, _ = vocabulary.features.repeat(lambda bounds: jnp.any(bounds[1] - bounds[0] > 1), 32, halve, (low, high))
    return jnp.where(active, _score(low), -jnp.inf)


def _key(scores: jax.Array) -> jax.Array:
    """Maps float32 scores to uint32 keys in the same order."""
    bits = jax.lax.bitcast_convert_type(scores + 0.0, jnp.uint32)  # -0.0 becomes 0.0, which it equals
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _score(keys: jax.Array) -> jax.Array:
    """Maps keys back to their scores."""
    bits = jnp.where(keys >> 31 == 1, keys & jnp.uint32((1 << 31) - 1), ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
