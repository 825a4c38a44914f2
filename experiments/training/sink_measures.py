"""Measures of attention sinks: attention that the first positions receive, and the norm of their values.

Source: arXiv:2410.10781, section 3.1 and figure 2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.dense import attention_weights, dense_attend
from ksana_jax.models.params import Params
from ksana_jax.models.transformer import forward

# Attention above which a position counts as a sink, and the number of tokens over which it is averaged.
EPSILON, SPAN = 0.3, 64


class SinkMeasures(NamedTuple):
    """Sinks of texts, per layer and head.

    received: [L, batch, N, k] mean attention that the first k positions receive (alpha_1 .. alpha_k).
    value_norm_ratio: [L, batch, K] norm of the first position's value, divided by the median over positions.
    """

    received: jax.Array | np.ndarray
    value_norm_ratio: jax.Array | np.ndarray


def received_attention(weights: jax.Array, num_first: int = 1) -> jax.Array:
    """Computes the mean attention [..., num_first] that each of the first positions receives.

    alpha_k is the mean of A[i, k] over the queries i that see position k, from k itself to the last. Uniform causal
    attention pays 0.074 to the first of 64 positions.

    Args:
      weights: [..., T, T] (query, key), causal.
    """
    length = weights.shape[-1]
    return jnp.sum(weights[..., :num_first], axis=-2) / (length - jnp.arange(num_first))


def sink_strength(received: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """Computes Sink_k [k]: the fraction of (layer, text, head) in which position k receives more than epsilon.

    Args:
      received: [L, batch, N, k] of `received_attention`.
    """
    return np.mean(np.asarray(received) > epsilon, axis=(0, 1, 2))


@functools.partial(jax.jit, static_argnames=("config", "num_first"))
def sink_measures(params: Params, tokens: jax.Array, *, config: ModelConfig, num_first: int = 1) -> SinkMeasures:
    """Measures the sinks of whole texts [batch, T] under the model's own patterns; num_first is at most T.

    Raises:
      ValueError: the model's patterns reposition sinks.
    """
    dense = dense_attend(params, tokens.shape[-1], config=config)

    def attend(layer, q, k, v, ratios):
        out, _ = dense(layer, q, k, v, None)
        if config.kv_layers is not None and v is None:
            return out, (*ratios, ratios[config.kv_layers[layer]])
        norms = jnp.linalg.norm(v.astype(jnp.float32), axis=-1)  # [batch, T, K]
        return out, (*ratios, norms[:, 0] / jnp.median(norms, axis=1))

    _, ratios = forward(params, tokens, attend, (), config=config)
    weights = attention_weights(params, tokens, config=config)
    return SinkMeasures(received_attention(weights, num_first), jnp.stack(ratios))
