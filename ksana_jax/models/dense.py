"""The network over whole texts, without a cache: the reference that training and the paged engine are held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.config import ModelConfig
from ksana_jax.models.rope import Rope, make_rope
from ksana_jax.models.transformer import Attend, Params, forward, logits


def causal_attend(rope: Rope, length: int) -> Attend:
    """An `Attend` for `forward`: causal attention over [..., length] tokens from position 0, softmax in float32."""
    angles = rope.angles(jnp.arange(length))
    visible = jnp.tril(jnp.ones((length, length), bool))

    def attend(layer, q, k, v, state):
        del layer
        q, k = rope.rotate(q, angles), rope.rotate(k, angles)
        group = q.shape[-2] // k.shape[-2]
        q = q.reshape(*q.shape[:-2], k.shape[-2], group, q.shape[-1])
        scores = jnp.einsum("...tkgh,...ckh->...kgtc", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("...kgtc,...ckh->...tkgh", weights, v, preferred_element_type=jnp.float32)
        return out.reshape(*out.shape[:-3], -1, out.shape[-1]).astype(q.dtype), state

    return attend


def dense_logits(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Logits [..., T, V] in float32 of whole texts [..., T] under full causal attention, without a cache."""
    attend = causal_attend(make_rope(config.rope, config.head_dim, tokens.shape[-1]), tokens.shape[-1])
    hidden, _ = forward(params, tokens, attend, None, config=config)
    return logits(params, hidden)


def attention_weights(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Attention probabilities [L, ..., N, T, T] (query, key) of whole texts [..., T] under full causal attention."""
    length = tokens.shape[-1]
    rope = make_rope(config.rope, config.head_dim, length)
    dense, angles = causal_attend(rope, length), rope.angles(jnp.arange(length))
    visible = jnp.tril(jnp.ones((length, length), bool))

    def attend(layer, q, k, v, state):
        repeated = jnp.repeat(rope.rotate(k, angles), q.shape[-2] // k.shape[-2], axis=-2)
        scores = jnp.einsum("...tnh,...cnh->...ntc", rope.rotate(q, angles), repeated) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(visible, scores.astype(jnp.float32), -jnp.inf), axis=-1)
        out, _ = dense(layer, q, k, v, None)
        return out, (*state, weights)

    _, weights = forward(params, tokens, attend, (), config=config)
    return jnp.stack(weights)
