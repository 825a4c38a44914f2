"""Causal attention with a custom backward pass, for training on a CPU.

It computes the same as `models.dense.dense_attend`. XLA on CPU multiplies bfloat16 fast (AMX) only if the left operand
is contracted over its last dimension; gradients of keys and values contract over queries, and were 8 to 13 times slower
(16 x 2 heads, 512 x 256, 2 cores, jax 0.10.2 and 0.12.0). The backward pass therefore recomputes the probabilities with
keys as rows, from the saved log-sum-exp (arXiv:2307.08691, algorithm 2). Queries are processed in blocks, and no block
computes scores for keys of a later block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ksana_jax.models.rope import Rope
from ksana_jax.models.transformer import Attend


def _dot(a: jax.Array, b: jax.Array, dim_b: int) -> jax.Array:
    """Contracts the last dimension of a with dim_b of b, both [batch, K, .., ..], in float32."""
    dims = (((3,), (dim_b,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _visible(rows: int, num_keys: int, start: int) -> jax.Array:
    """Returns [G*Q, C] bool, whether a query sees a key; queries of a head are at positions start .. C-1."""
    positions = jnp.tile(jnp.arange(start, num_keys), rows // (num_keys - start))
    return jnp.arange(num_keys) <= positions[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend_block(q, k, v, sinks, start: int, scale: float):
    """Attends queries [batch, K, G*Q, H] at positions start .. C-1 to keys and values [batch, K, C, H].

    sinks: [K, G*Q] float32 sink logit of each query, or None.
    """
    return _block_forward(q, k, v, sinks, start, scale)[0]


def _block_forward(q, k, v, sinks, start, scale):
    scores = _dot(q, k, 3) * scale
    scores = jnp.where(_visible(q.shape[2], k.shape[2], start), scores, -jnp.inf)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    if sinks is not None:
        log_sum = jnp.logaddexp(log_sum, sinks)
    weights = jnp.exp(scores - log_sum[..., None]).astype(q.dtype)
    out = _dot(weights, v, 2).astype(q.dtype)
    return out, (q, k, v, sinks, log_sum, out)


def _block_backward(start, scale, saved, grad):
    q, k, v, sinks, log_sum, out = saved
    visible = _visible(q.shape[2], k.shape[2], start)
    # Softmax: d scores = p (d p - sum_c p d p), and that sum over keys equals out . grad. A sink logit's d p is 0.
    mean = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1)
    weights = jnp.where(visible.T, jnp.exp(_dot(k, q, 3) * scale - log_sum[..., None, :]), 0.0)  # [.., C, G*Q]
    grad_scores = (weights * (_dot(v, grad, 3) - mean[..., None, :]) * scale).astype(q.dtype)
    grad_q = _transposed(_dot(_transposed(k), grad_scores, 2))
    grad_k = _dot(grad_scores, q, 2)
    grad_v = _dot(weights.astype(q.dtype), grad, 2)
    grad_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks - log_sum) * mean, axis=0)
    return *(g.astype(q.dtype) for g in (grad_q, grad_k, grad_v)), grad_sinks


def _transposed(a: jax.Array) -> jax.Array:
    """Transposes the last two dimensions in halves, because XLA would fold a whole transposition into the product."""
    return jnp.concatenate([jnp.swapaxes(half, 2, 3) for half in jnp.array_split(a, 2, axis=2)], axis=3)


_attend_block.defvjp(_block_forward, _block_backward)


def training_attend(
    rope: Rope,
    length: int,
    sink_logits: Sequence[jax.Array | None],
    kv_layers: Sequence[int] | None = None,
    block: int = 128,
    scale: float | None = None,
) -> Attend:
    """Returns dense causal attention over [batch, length] tokens at positions 0, 1, ...; softmax in float32.

    Args:
      sink_logits: [N] of each layer (`models.params.sink_logits`), or None.
      kv_layers: see `ModelConfig.kv_layers`.
      block: number of queries in a block.
      scale: of scores; None takes 1 / sqrt(head_dim).
    """
    angles = rope.angles(jnp.arange(length))
    held: dict[int, tuple[jax.Array, jax.Array]] = {}  # by layer, for those that read them

    def attend(layer, q, k, v, state):
        q = rope.rotate(q, angles)
        if k is not None:
            held[layer] = rope.rotate(k, angles).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        k, v = held[layer if kv_layers is None else kv_layers[layer]]  # [batch, K, T, H]
        sinks = sink_logits[layer]
        batch, _, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        factor = scale or head_dim**-0.5
        q = q.reshape(batch, length, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [batch, K, G, T, H]
        outs: list[jax.Array] = []
        for start in range(0, length, block):
            end = min(start + block, length)
            q_block = q[:, :, :, start:end].reshape(batch, num_kv_heads, -1, head_dim)
            of_rows = None
            if sinks is not None:
                of_rows = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), end - start, axis=1)
            out = jnp.asarray(_attend_block(q_block, k[:, :, :end], v[:, :, :end], of_rows, start, factor))
            outs.append(out.reshape(batch, num_kv_heads, -1, end - start, head_dim))
        out = jnp.concatenate(outs, axis=3).transpose(0, 3, 1, 2, 4)
        return out.reshape(batch, length, num_heads, head_dim), state

    return attend
