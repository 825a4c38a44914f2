"""Chooses tokens. All settings are arrays with one entry per row, so that requests that differ share a compilation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.step.contract import SamplingArrays


def sample(logits_SV: jax.Array, settings: SamplingArrays | None) -> jax.Array:
    """One token [S] for each row of float32 scores [S, V]; None takes the most probable everywhere.

    A row's choice depends on its own scores, seed and number of tokens so far, never on the other rows. Of equal scores
    the lowest id wins. A row whose best score is not finite (one score is NaN, or all are -inf) gets -1.
    """
    if settings is not None:
        logits_SV = adjust(logits_SV, settings)
    greedy, best = jnp.argmax(logits_SV, axis=-1), jnp.max(logits_SV, axis=-1, keepdims=True)
    usable = jnp.isfinite(best[:, 0])
    if settings is None:
        return jnp.where(usable, greedy, -1).astype(jnp.int32)
    heat = jnp.where(settings.temperature > 0, settings.temperature, 1.0)
    # From the best downwards: a small temperature must not take it to infinity.
    below_best = logits_SV - best
    kept = truncate(below_best / heat[:, None], settings.top_k, settings.top_p, settings.min_p)
    # Gumbel's trick: the largest of (score + noise) is distributed as the softmax of the scores.
    drawn = jnp.argmax(kept + _noise(settings, logits_SV.shape[-1]), axis=-1)
    return jnp.where(usable, jnp.where(settings.temperature > 0, drawn, greedy), -1).astype(jnp.int32)


def adjust(logits_SV: jax.Array, settings: SamplingArrays) -> jax.Array:
    """Adds biases, then applies repetition, frequency and presence penalties, as vLLM and OpenAI define them."""
    if settings.counts is None or settings.in_prompt is None or settings.bias is None:
        return logits_SV
    logits_SV = logits_SV + settings.bias
    generated = settings.counts > 0
    repeated = generated | settings.in_prompt
    factor = settings.repetition_penalty[:, None]
    penalised = jnp.where(logits_SV > 0, logits_SV / factor, logits_SV * factor)
    logits_SV = jnp.where(repeated, penalised, logits_SV)
    logits_SV = logits_SV - settings.frequency_penalty[:, None] * settings.counts
    return logits_SV - settings.presence_penalty[:, None] * generated


def truncate(logits_SV: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Scores [S, V] with -inf for tokens outside the k most probable, the nucleus p, or min_p of the best.

    Args:
      top_k: [S]; below 1 keeps all. top_p: [S] in (0, 1]; the smallest set that reaches it is kept. min_p: [S].

    Tokens that tie with the last one kept are kept too. Source: nucleus sampling, arXiv:1904.09751; min-p,
    arXiv:2407.01082.
    """
    vocab = logits_SV.shape[-1]
    ordered = -jnp.sort(-logits_SV, axis=-1)
    kth = jnp.clip(jnp.where(top_k < 1, vocab, top_k), 1, vocab) - 1
    floor_k = jnp.take_along_axis(ordered, kth[:, None], axis=-1)
    # The nucleus is taken within the k most probable.
    among_k = jnp.where(ordered >= floor_k, ordered, -jnp.inf)
    probs = jax.nn.softmax(among_k, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    in_nucleus = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    floor_p = jnp.min(jnp.where(in_nucleus, among_k, jnp.inf), axis=-1, keepdims=True)
    floor_m = ordered[:, :1] + jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)[:, None]
    # The best stays, even where a tiny top_p is 0 in float32.
    floor = jnp.minimum(jnp.maximum(jnp.maximum(floor_k, floor_p), floor_m), ordered[:, :1])
    return jnp.where(logits_SV >= floor, logits_SV, -jnp.inf)


def _noise(settings: SamplingArrays, vocab: int) -> jax.Array:
    def one(seed, step):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(one)(settings.seeds, settings.num_outputs)


def score(logits_SV: jax.Array, tokens: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of given tokens, and of the most probable ones.

    Args:
      logits_SV: float32 scores [S, V].
      tokens: [S] ids; where negative the result means nothing.

    Returns:
      logprob [S], rank [S] (1 for the most probable; ties share the better rank), top ids [S, num_top] and their
      log-probabilities [S, num_top], falling.
    """
    logprobs = jax.nn.log_softmax(logits_SV, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)
    rank = 1 + jnp.sum(logprobs > chosen, axis=-1)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top)
    return chosen[:, 0], rank.astype(jnp.int32), top_ids.astype(jnp.int32), top_logprobs
