"""Metrics of a training run: held-out loss, and the attention paid to the first token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ksana_jax.config import ModelConfig
from ksana_jax.models.dense import attention_weights, dense_logits
from ksana_jax.models.params import Params
from ksana_jax.training.batches import IGNORED

EPSILON, SPAN = 0.3, 64


def first_token_attention(params: Params, inputs, *, config: ModelConfig) -> jax.Array:
    """Computes the mean attention [L, batch, N] of queries 0 .. T-1 of inputs [batch, T] to position 0 (alpha_1).

    Query 0 counts as well, with attention 1. Uniform causal attention gives 0.074 at T = 64.

    Source: arXiv:2410.10781, section 3.1.
    """
    return jnp.mean(attention_weights(params, inputs, config=config)[..., 0], axis=-1)


@functools.partial(jax.jit, static_argnames="config")
def _batch_metrics(params, inputs, targets, *, config: ModelConfig):
    scored = targets != IGNORED
    scores = dense_logits(params, inputs, config=config)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.where(scored, targets, 0))
    first = first_token_attention(params, inputs[:, :SPAN], config=config)
    return jnp.sum(losses * scored), jnp.sum(scored), first


def evaluate(params: Params, inputs: np.ndarray, targets: np.ndarray, *, config: ModelConfig, batch_size: int) -> dict:
    """Evaluates held-out sequences [sequences, T] in float32.

    Returns:
      heldout_loss: nats per token. sink_1: fraction of (layer, head, sequence) whose first token receives more than
      EPSILON of the attention, averaged over the first SPAN tokens (Sink_1 of arXiv:2410.10781, with a
      beginning-of-text token). first_token_attention: [L], mean per layer.
    """
    total, count, first = 0.0, 0, []
    for begin in range(0, len(inputs), batch_size):
        rows = slice(begin, begin + batch_size)
        loss, scored, weights = _batch_metrics(params, inputs[rows], targets[rows], config=config)
        total, count = total + float(loss), count + int(scored)
        first.append(np.asarray(weights))
    received = np.concatenate(first, axis=1)
    return {
        "heldout_loss": round(total / max(count, 1), 5),
        "sink_1": round(float(np.mean(received > EPSILON)), 4),
        "first_token_attention": [round(float(layer), 4) for layer in received.mean(axis=(1, 2))],
    }
