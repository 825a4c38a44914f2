"""A dense reference that honours each layer's attention pattern, which `dense_logits` does not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.config import ModelConfig
from ksana_jax.models.rope import make_rope
from ksana_jax.models.transformer import Params, forward, logits
from ksana_jax.patterns import per_layer


@functools.partial(jax.jit, static_argnames=("config", "max_len"))
def pattern_logits(params: Params, tokens: jax.Array, *, config: ModelConfig, max_len: int | None = None) -> jax.Array:
    """Scores [T, V] of one text [T] in float32; keys that a layer's pattern hides are masked."""
    length = tokens.shape[0]
    rope = make_rope(config.rope, config.head_dim, max_len or length)
    positions = np.arange(length)
    angles = rope.angles(positions)
    masks = [p.visible(positions[:, None], positions[None]) for p in per_layer(config.pattern, config.num_layers)]

    def attend(layer, q, k, v, state):
        group = q.shape[1] // k.shape[1]
        q, k, v = rope.rotate(q, angles), jnp.repeat(rope.rotate(k, angles), group, 1), jnp.repeat(v, group, 1)
        scores = jnp.einsum("tnh,cnh->ntc", q, k) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(masks[layer], scores, -jnp.inf), -1)
        return jnp.einsum("ntc,cnh->tnh", weights, v), state

    hidden, _ = forward(params, tokens, attend, None, config=config)
    return logits(params, hidden)
