"""The network over whole texts, without a cache: the reference that training and the paged engine are held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.config import ModelConfig
from ksana_jax.models.layers import soft_capped
from ksana_jax.models.params import Params
from ksana_jax.models.rope import layer_ropes
from ksana_jax.models.transformer import Attend, forward, logits


def dense_attend(params: Params, length: int, *, config: ModelConfig, max_len: int | None = None) -> Attend:
    """An `Attend` for `forward`: attention over whole texts [..., length] from position 0, softmax in float32.

    Each layer has its own rope, pattern, scale, soft cap and learned sinks.

    Args:
      max_len: longest text to be served, for `make_rope`; None is length.

    Raises:
      ValueError: the model's patterns place sinks at other than their own positions.
    """
    return _attend(params, length, config, max_len, lambda state, weights: state)


def dense_logits(params: Params, tokens: jax.Array, *, config: ModelConfig, max_len: int | None = None) -> jax.Array:
    """Logits [..., T, V] in float32 of whole texts [..., T], without a cache; see `dense_attend`."""
    attend = dense_attend(params, tokens.shape[-1], config=config, max_len=max_len)
    hidden, _ = forward(params, tokens, attend, None, config=config)
    return logits(params, hidden, config=config)


def attention_weights(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Attention probabilities [L, ..., N, T, T] (query, key) of whole texts [..., T]; see `dense_attend`."""
    attend = _attend(params, tokens.shape[-1], config, None, lambda state, weights: (*state, weights))
    _, weights = forward(params, tokens, attend, (), config=config)
    return jnp.stack(weights)


def _attend(
    params: Params, length: int, config: ModelConfig, max_len: int | None, keep: Callable[[Any, jax.Array], Any]
) -> Attend:
    """Attention whose state is what `keep` makes of the state and a layer's probabilities [..., N, T, T]."""
    if any(layer.attention.pattern.num_rotated_sinks for layer in config.layers):
        raise ValueError("dense attention has sinks at their own positions only; the engine serves the others")
    positions = jnp.arange(length)
    ropes = layer_ropes(config, max_len or length)
    angles = {id(rope): rope.angles(positions) for rope in ropes}

    def attend(layer, q, k, v, state):
        spec, rope = config.layers[layer].attention, ropes[layer]
        q, k = (rope.rotate(x, angles[id(rope)]) for x in (q, k))
        grouped = q.reshape(*q.shape[:-2], spec.num_kv_heads, -1, spec.head_dim)
        scores = jnp.einsum("...tkgh,...ckh->...kgtc", grouped, k, preferred_element_type=jnp.float32) * spec.scale
        visible = spec.pattern.visible(positions[:, None], positions)
        scores = jnp.where(visible, soft_capped(scores, spec.soft_cap), -jnp.inf)
        weights = _softmax(scores, params.layers[layer].sink_logits)
        out = jnp.einsum("...kgtc,...ckh->...tkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        state = keep(state, weights.reshape(*weights.shape[:-4], -1, length, length))
        return out.reshape(q.shape).astype(q.dtype), state

    return attend


def _softmax(scores: jax.Array, sink_logits: jax.Array | None) -> jax.Array:
    """Softmax of scores [..., K, G, T, C] over C, whose denominator a learned logit of each head [N] may join."""
    if sink_logits is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sink_logits.astype(jnp.float32).reshape(scores.shape[-4:-2])[..., None, None]
    scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    return jax.nn.softmax(scores, axis=-1)[..., :-1]
