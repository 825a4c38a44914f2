"""Samples tokens. Settings are arrays with one entry per row, so requests with different settings share one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.sampling.noise import gumbel_noise
from ksana_jax.sampling.sums import sum_by_halves
from ksana_jax.sampling.truncation import Limits, least_kept
from ksana_jax.sampling.vocabulary import WHOLE, Vocabulary
from ksana_jax.scheduler.step.settings import SamplingArrays

# Width of the groups of a row's scores that top-k search and drawing use.
GROUP = 128


@jax.named_scope("sampling")
def sample(logits_SV: jax.Array, settings: SamplingArrays | None, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Samples one token [S] for each row of float32 scores [S, V]; settings None takes the most probable in all rows.

    Args:
      vocabulary: maps this device's scores, penalties and biases to the whole vocabulary.

    A row's choice depends on its own scores, seed and number of tokens so far, never on the other rows or their number.
    Among equal scores, the lowest id wins. A forced token is taken whatever its score. A row whose best score is not
    finite (a score is NaN, or all are -inf) gets -1.
    """
    if settings is not None:
        logits_SV = adjust(logits_SV, settings)
    logits_SGW = _grouped(logits_SV)
    greedy, best = vocabulary.best(*_argmax(logits_SGW))
    usable = jnp.isfinite(best)
    if settings is None:
        return jnp.where(usable, greedy, -1).astype(jnp.int32)
    draws = settings.temperature > 0
    temperature = jnp.where(draws, settings.temperature, 1.0)
    limits = Limits(settings.top_k, settings.top_p, settings.min_p)
    # One program serves all requests: it skips at run time what no row needs.
    least = vocabulary.features.either(
        jnp.any(draws & limits.exclude(vocabulary.size(logits_SV))),
        lambda logits: least_kept(logits, best, temperature, limits, vocabulary),
        lambda _: jnp.full_like(best, -jnp.inf),
        logits_SV,
    )
    drawn = vocabulary.features.either(
        jnp.any(draws),
        lambda logits: _draw(logits, best, temperature, least, settings, vocabulary),
        lambda _: greedy,
        logits_SGW,
    )
    chosen = jnp.where(settings.forced >= 0, settings.forced, jnp.where(draws, drawn, greedy))
    return jnp.where(usable, chosen, -1).astype(jnp.int32)


def _grouped(logits_SV: jax.Array) -> jax.Array:
    """Divides scores [S, V] into groups of neighbours: [S, G, W], padded with -inf."""
    rows, vocab = logits_SV.shape
    padding = -vocab % GROUP
    if padding:
        logits_SV = jnp.pad(logits_SV, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits_SV.reshape(rows, -1, GROUP)


def _argmax(logits_SGW: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lowest id [S] of the best score, and that score [S].

    XLA:CPU vectorises a maximum and not an argmax: of 131,072 scores in groups it takes a tenth of the time.
    """
    best_SG = jnp.max(logits_SGW, axis=-1)
    group = jnp.argmax(best_SG, axis=-1)
    at = jnp.argmax(_in_group(logits_SGW, group), axis=-1)
    return group * GROUP + at, jnp.max(best_SG, axis=-1)


def _in_group(logits_SGW: jax.Array, group: jax.Array) -> jax.Array:
    """Returns the scores [S, W] of one group [S] of each row."""
    return jnp.take_along_axis(logits_SGW, group[:, None, None], axis=1, mode="clip")[:, 0]


def _draw(
    logits_SGW: jax.Array,
    best: jax.Array,
    temperature: jax.Array,
    least: jax.Array,
    settings: SamplingArrays,
    vocabulary: Vocabulary,
) -> jax.Array:
    """Draws a token [S] from the softmax of scores / temperature [S], over scores of at least `least` [S].

    The Gumbel-max trick (the argmax of score + noise is distributed as the softmax of the scores) first draws a group
    by the logarithm of its sum, then a token of it: noise for G + W numbers, not for V.

    Args:
      best: [S] best score.
    """
    num_groups = vocabulary.num_groups(logits_SGW)
    noise = gumbel_noise(settings, num_groups + GROUP, vocabulary.features.generator)

    def kept(logits: jax.Array) -> jax.Array:
        of_row = (slice(None), *[None] * (logits.ndim - 1))
        scaled = (logits - best[of_row]) / temperature[of_row]
        return jnp.where(logits >= least[of_row], scaled, -jnp.inf)

    sums = sum_by_halves(jnp.exp(kept(logits_SGW)))
    of_groups = jnp.log(sums) + vocabulary.own_groups(noise[:, :num_groups])
    group = jnp.argmax(of_groups, axis=-1)
    at = jnp.argmax(kept(_in_group(logits_SGW, group)) + noise[:, num_groups:], axis=-1)
    return vocabulary.best(group * GROUP + at, jnp.max(of_groups, axis=-1))[0]


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
