"""Small parts of the network. Arrays in, arrays out; matrices are stored [out, in], as in Hugging Face checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def linear(x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """x [..., in] times w [out, in], plus b [out]: [..., out] in x's dtype, accumulated in float32."""
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if b is not None:
        y = y + b
    return y.astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides x [..., D] by its root mean square, times weight [D]; computed in float32 (arXiv:1910.07467)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight * x32.astype(x.dtype)


def swiglu(x: jax.Array, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None) -> jax.Array:
    """Gated feed-forward of x [..., D]: down(silu(gate x) * up x) (arXiv:2002.05202)."""
    hidden = jax.nn.silu(linear(x, w_gate, b_gate)) * linear(x, w_up, b_up)
    return linear(hidden, w_down, b_down)
