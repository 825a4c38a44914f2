"""Metrics of a training run: held-out loss, the attention paid to the first token, accuracy of recall."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.training.batches import IGNORED
from experiments.training.sink_measures import SPAN, received_attention, sink_strength
from ksana_jax.core.config import ModelConfig
from ksana_jax.models.dense import attention_weights, dense_logits
from ksana_jax.models.params import Params


def resting_attention(params: Params, inputs, *, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Computes the mean attention of queries 0 .. T-1 of inputs [batch, T] to position 0 and to the sink logits.

    Query 0 counts as well, with attention 1 if there are no sink logits. Uniform causal attention pays 0.074 to
    position 0 at T = 64.

    Returns:
      [L, batch, N] to position 0 (alpha_1), and [L, batch, N] to the sink logit of each head.

    Source: arXiv:2410.10781, section 3.1.
    """
    weights = attention_weights(params, inputs, config=config)
    return received_attention(weights)[..., 0], 1 - jnp.mean(jnp.sum(weights, axis=-1), axis=-1)


@functools.partial(jax.jit, static_argnames="config")
def _batch_metrics(params, inputs, targets, *, config: ModelConfig):
    scored = targets != IGNORED
    scores = dense_logits(params, inputs, config=config)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.where(scored, targets, 0))
    return jnp.sum(losses * scored), jnp.sum(scored), resting_attention(params, inputs[:, :SPAN], config=config)


def evaluate(params: Params, inputs: np.ndarray, targets: np.ndarray, *, config: ModelConfig, batch_size: int) -> dict:
    """Evaluates held-out sequences [sequences, T] in float32.

    Returns:
      heldout_loss: nats per token. sink_1: fraction of (layer, head, sequence) whose first token receives more than
      0.3 of the attention, averaged over the first 64 tokens (Sink_1 of arXiv:2410.10781; the first token is the
      beginning-of-text token if the sequences have one). first_token_attention: [L], mean per layer.
      sink_logit_attention: [L], the mean that sink logits take, if the model has them.
    """
    total, count, batches = 0.0, 0, []
    for begin in range(0, len(inputs), batch_size):
        rows = slice(begin, begin + batch_size)
        loss, scored, attention = _batch_metrics(params, inputs[rows], targets[rows], config=config)
        total, count = total + float(loss), count + int(scored)
        batches.append(np.asarray(attention))
    received, given_up = np.concatenate(batches, axis=2)
    measured = {
        "heldout_loss": round(total / max(count, 1), 5),
        "sink_1": round(float(sink_strength(received[..., None])[0]), 4),
        "first_token_attention": _by_layer(received),
    }
    return measured | ({"sink_logit_attention": _by_layer(given_up)} if config.sinks else {})


@functools.partial(jax.jit, static_argnames="config")
def _answered(params, inputs, targets, *, config: ModelConfig):
    best = jnp.argmax(dense_logits(params, inputs, config=config), axis=-1)
    return jnp.all((best == targets) | (targets == IGNORED), axis=-1)


def recall_accuracy(
    params: Params, questions: Mapping[str, tuple[np.ndarray, np.ndarray]], *, config: ModelConfig
) -> dict[str, float]:
    """Computes the fraction of questions that greedy decoding answers, by kind.

    Args:
      questions: by kind inputs and targets [questions, T]; only the tokens of answers are targets.
    """
    return {
        kind: round(float(np.mean(_answered(params, inputs, targets, config=config))), 4)
        for kind, (inputs, targets) in questions.items()
    }


def _by_layer(attention: np.ndarray) -> list[float]:
    """Averages attention [L, sequences, N] over sequences and heads."""
    return [round(float(layer), 4) for layer in attention.mean(axis=(1, 2))]
