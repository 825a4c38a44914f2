"""Samples tokens. Settings are arrays with one entry per row, so requests with different settings share one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.step.contract import SamplingArrays


def sample(logits_SV: jax.Array, settings: SamplingArrays | None) -> jax.Array:
    """Samples one token [S] for each row of float32 scores [S, V]; settings None takes the most probable in all rows.

    A row's choice depends on its own scores, seed and number of tokens so far, never on the other rows. Among equal
    scores, the lowest id wins. A row whose best score is not finite (a score is NaN, or all are -inf) gets -1.
    """
    if settings is not None:
        logits_SV = adjust(logits_SV, settings)
    greedy, best = jnp.argmax(logits_SV, axis=-1), jnp.max(logits_SV, axis=-1, keepdims=True)
    usable = jnp.isfinite(best[:, 0])
    if settings is None:
        return jnp.where(usable, greedy, -1).astype(jnp.int32)
    heat = jnp.where(settings.temperature > 0, settings.temperature, 1.0)
    # Relative to the best score, so that a small temperature cannot overflow.
    scaled = (logits_SV - best) / heat[:, None]
    limits = settings.top_k, settings.top_p, settings.min_p
    truncated = _truncates(logits_SV.shape[-1], *limits) & (settings.temperature > 0)
    # One program serves all requests: it skips at run time what no row needs.
    kept = jax.lax.cond(jnp.any(truncated), truncate, lambda scores, *_: scores, scaled, *limits)
    # Gumbel-max trick: the argmax of (score + noise) is distributed as the softmax of the scores.
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
    """Sets the scores [S, V] of tokens outside top-k, top-p or min-p to -inf.

    Args:
      top_k: [S]; below 1 keeps all. top_p: [S] in (0, 1]; keeps the smallest set that reaches this probability.
      min_p: [S]; minimum probability relative to the best token's.

    Tokens that tie with the last one kept are kept too. Source: nucleus sampling, arXiv:1904.09751; min-p,
    arXiv:2407.01082.
    """
    vocab = logits_SV.shape[-1]
    best = jnp.max(logits_SV, axis=-1, keepdims=True)
    keys = _ordered(logits_SV)
    k = jnp.where(top_k < 1, vocab, jnp.minimum(top_k, vocab))
    floor_k = _floor(keys, jnp.ones_like(logits_SV, jnp.int32), k, k < vocab)
    # top_p applies to what top_k has kept.
    weights = jnp.where(keys >= floor_k[:, None], jnp.exp(logits_SV - best), 0.0)
    floor_p = _floor(keys, weights, top_p * jnp.sum(weights, axis=-1), top_p < 1.0)
    floor_m = best + jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)[:, None]
    kept = (keys >= jnp.maximum(floor_k, floor_p)[:, None]) & (logits_SV >= floor_m)
    # The best token stays, even if rounding with a min_p of 1 would exclude it.
    return jnp.where(kept | (logits_SV == best), logits_SV, -jnp.inf)


def _truncates(vocab: int, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Whether settings [S] can exclude tokens."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0)


def _ordered(scores: jax.Array) -> jax.Array:
    """Maps float32 scores to uint32 keys in the same order."""
    bits = jax.lax.bitcast_convert_type(scores + 0.0, jnp.uint32)  # -0.0 becomes 0.0, which it equals
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _floor(keys_SV: jax.Array, weights_SV: jax.Array, wanted: jax.Array, active: jax.Array) -> jax.Array:
    """Finds the highest key [S] such that the weights of tokens at or above it reach `wanted`, by bisection.

    Args:
      keys_SV: uint32. weights_SV: not negative. wanted: [S] sums of weights. active: [S]; other rows get 0.

    At most 32 passes, no sort. Ends when at most one token is between the bounds of each row: any key down to that
    token keeps the same tokens.
    """

    def unsettled(bounds):
        low, high, num_low, num_high = bounds
        return jnp.any((high - low > 1) & (num_low - num_high > 1))

    def halve(bounds):
        low, high, num_low, num_high = bounds
        middle = low + (high - low) // 2
        above = keys_SV >= middle[:, None]
        num = jnp.sum(above, axis=-1, dtype=jnp.int32)
        enough = jnp.sum(jnp.where(above, weights_SV, 0), axis=-1) >= wanted
        low, num_low = jnp.where(enough, middle, low), jnp.where(enough, num, num_low)
        return low, jnp.where(enough, high, middle), num_low, jnp.where(enough, num_high, num)

    # Tokens at or above `low` reach `wanted`, tokens at or above `high` do not.
    low = jnp.where(active, jnp.min(keys_SV, axis=-1), 0)
    high = jnp.where(active, jnp.max(keys_SV, axis=-1) + 1, 0)
    num_low = jnp.full(wanted.shape, keys_SV.shape[-1], jnp.int32)
    return jax.lax.while_loop(unsettled, halve, (low, high, num_low, jnp.zeros_like(num_low)))[0]


def _noise(settings: SamplingArrays, vocab: int) -> jax.Array:
    def one(seed, step):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(one)(settings.seeds, settings.num_outputs)


def score(logits_SV: jax.Array, tokens: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes log-probabilities of given tokens, and of the most probable ones.

    Args:
      logits_SV: float32 scores [S, V].
      tokens: [S] ids; results for negative ids are undefined.

    Returns:
      logprob [S], rank [S] (1 for the most probable; ties share the better rank), top ids [S, num_top] and their
      log-probabilities [S, num_top], descending.
    """
    logprobs = jax.nn.log_softmax(logits_SV, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)
    rank = 1 + jnp.sum(logprobs > chosen, axis=-1)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top)
    return chosen[:, 0], rank.astype(jnp.int32), top_ids.astype(jnp.int32), top_logprobs
