"""Probabilities of tokens: those with which `sampler.sample` chooses, and those that scores give them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.sampling.sampler import adjust
from ksana_jax.sampling.sums import sum_by_halves
from ksana_jax.sampling.truncation import Limits, least_kept
from ksana_jax.sampling.vocabulary import WHOLE, Vocabulary
from ksana_jax.scheduler.step.types import SamplingArrays


@jax.named_scope("sampling")
def distribution(logits_SV: jax.Array, settings: SamplingArrays) -> jax.Array:
    """Returns the probabilities [S, V] with which `sample` chooses tokens; NaN for rows without a finite best score."""
    logits_SV = adjust(logits_SV, settings)
    best = jnp.max(logits_SV, axis=-1)
    draws = settings.temperature > 0
    temperature = jnp.where(draws, settings.temperature, 1.0)
    limits = Limits(settings.top_k, settings.top_p, settings.min_p)
    least = least_kept(logits_SV, best, temperature, limits)
    scaled = (logits_SV - best[:, None]) / temperature[:, None]
    drawn = jax.nn.softmax(jnp.where(logits_SV >= least[:, None], scaled, -jnp.inf), axis=-1)
    taken = jnp.where(settings.forced >= 0, settings.forced, jnp.argmax(logits_SV, axis=-1))
    certain = jax.nn.one_hot(taken, logits_SV.shape[-1], dtype=drawn.dtype)
    found = jnp.where((draws & (settings.forced < 0))[:, None], drawn, certain)
    return jnp.where(jnp.isfinite(best)[:, None], found, jnp.nan)


@jax.named_scope("sampling")
def score(
    logits_SV: jax.Array, tokens: jax.Array, num_top: int, vocabulary: Vocabulary = WHOLE
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes log-probabilities of given tokens, and of the most probable ones.

    Args:
      logits_SV: float32 scores [S, V].
      tokens: [S] ids; results for negative ids are undefined.
      vocabulary: maps this device's scores to the whole vocabulary.

    Returns:
      logprob [S], rank [S] (1 for the most probable; ties share the better rank), top ids [S, num_top] and their
      log-probabilities [S, num_top], descending.
    """
    logprobs = log_softmax(logits_SV, vocabulary)
    chosen = vocabulary.pick(logprobs, jnp.maximum(tokens, 0))
    rank = 1 + vocabulary.sum(jnp.sum(logprobs > chosen, axis=-1))
    top_logprobs, top_ids = vocabulary.top(logprobs, num_top)
    return chosen[:, 0], rank.astype(jnp.int32), top_ids.astype(jnp.int32), top_logprobs


def log_softmax(logits_SV: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Returns the log-probabilities [S, V] of this device's ids; a row's bits do not depend on the other rows."""
    shifted = logits_SV - vocabulary.max(jnp.max(logits_SV, axis=-1, keepdims=True))
    return shifted - jnp.log(vocabulary.sum(sum_by_halves(jnp.exp(shifted))))[:, None]
