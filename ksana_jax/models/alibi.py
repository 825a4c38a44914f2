"""ALiBi: scores fall with the distance of a key, by a slope of each head (arXiv:2108.12409). Knows no cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def biases(slopes: jax.Array, q_pos: jax.Array, kv_pos: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns what is added to scores [..., K, G, Q, C], in float32.

    Args:
      slopes: [N]. q_pos, kv_pos: integers [..., Q, 1] and [..., 1, C].
    """
    distance = (kv_pos - q_pos).astype(jnp.float32)
    return slopes.reshape(num_kv_heads, -1, 1, 1) * distance[..., None, None, :, :]
