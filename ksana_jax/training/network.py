"""The Llama forward for training: `models.transformer.forward` with products whose gradients are fast on a CPU.

XLA on CPU multiplies bfloat16 fast only when the left operand is contracted over its last dimension. The gradient of a
weight contracts over tokens; written plainly it is widened to float32 and was 5 to 8 times slower (4096 tokens, 192 x
512, 2 cores, jax 0.10.2 and 0.12.0).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.config import ModelConfig
from ksana_jax.models.layers import rms_norm
from ksana_jax.models.rope import make_rope
from ksana_jax.models.transformer import Params
from ksana_jax.training.attention import training_attend


def _dot(a: jax.Array, b: jax.Array, dim_b: int) -> jax.Array:
    """Contracts the last dimension of a with dim_b of the matrix b; in float32."""
    return jax.lax.dot_general(a, b, (((a.ndim - 1,), (dim_b,)), ((), ())), preferred_element_type=jnp.float32)


def _transposed(a: jax.Array, parts: int = 8) -> jax.Array:
    """a.T of a matrix, in parts: XLA would fold a whole transposition back into the product that reads it."""
    return jnp.concatenate([part.T for part in jnp.array_split(a, min(parts, len(a)))], axis=1)


@jax.custom_vjp
def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., in] times w [out, in]: [..., out] in float32."""
    return _dot(x, w, 1)


def _linear_forward(x, w):
    return linear(x, w), (x, w)


def _linear_backward(saved, grad):
    x, w = saved
    grad = grad.astype(x.dtype)
    grad_x = _dot(grad, w, 0).astype(x.dtype)
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    if grad.shape[-1] <= x.shape[-1]:  # transpose the narrower one
        grad_w = _dot(_transposed(grad), x, 0)
    else:
        grad_w = _transposed(_dot(_transposed(x), grad, 0))
    return grad_x, grad_w.astype(w.dtype)


linear.defvjp(_linear_forward, _linear_backward)


def training_logits(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Scores [batch, T, V] in float32 of whole texts [batch, T], computed in the parameters' type.

    Llama only: no biases, no q/k norm, tied embeddings.
    """
    batch, length = tokens.shape
    attend = training_attend(make_rope(config.rope, config.head_dim, length), length)
    dtype = params.embed.dtype

    def project(x, w):
        return linear(x, w).astype(dtype)

    x = params.embed[tokens]
    for index, p in enumerate(params.layers):
        y = rms_norm(x, p.attn_norm, config.norm_eps)
        q, k, v = (project(y, w).reshape(batch, length, -1, config.head_dim) for w in (p.w_q, p.w_k, p.w_v))
        out, _ = attend(index, q, k, v, None)
        x = x + project(out.reshape(batch, length, -1), p.w_o)
        y = rms_norm(x, p.mlp_norm, config.norm_eps)
        x = x + project(jax.nn.silu(project(y, p.w_gate)) * project(y, p.w_up), p.w_down)
    return linear(rms_norm(x, params.final_norm, config.norm_eps), params.embed)
