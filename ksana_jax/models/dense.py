"""Dense attention over whole texts, without a cache: the reference for training and the paged engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.methods.selection.lightning_indexer import index_scores
from ksana_jax.models.alibi import biases
from ksana_jax.models.frequencies import layer_ropes
from ksana_jax.models.latents import Indexed
from ksana_jax.models.layers import soft_capped
from ksana_jax.models.params import Params
from ksana_jax.models.rope import grown
from ksana_jax.models.transformer import Attend, forward, logits, sink_logits


def dense_attend(
    params: Params,
    length: int,
    *,
    config: ModelConfig,
    max_len: int | None = None,
    sees: Callable[[int], jax.Array] | None = None,
) -> Attend:
    """Returns an `Attend` for `forward`: attention over texts [..., length] from position 0, softmax in float32.

    Each layer uses its own rope, pattern, scale, soft cap and sink logits.

    Args:
      max_len: tokens of the longest text to serve, for `make_rope`; None takes `length`.
      sees: layer -> [K, T, T] bool, keys that each kv head sees of those that the pattern shows; None sees all.

    Raises:
      ValueError: the model's patterns reposition sinks.
    """
    return _attend(params, length, config, max_len, lambda state, weights: state, sees)


def dense_logits(params: Params, tokens: jax.Array, *, config: ModelConfig, max_len: int | None = None) -> jax.Array:
    """Computes logits [..., T, V] in float32 of whole texts [..., T], without a cache; see `dense_attend`."""
    attend = dense_attend(params, tokens.shape[-1], config=config, max_len=max_len)
    hidden, _ = forward(params, tokens, attend, None, config=config)
    return logits(params, hidden, config=config)


def attention_weights(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Computes attention probabilities [L, ..., N, T, T] (query, key) of whole texts [..., T]; see `dense_attend`."""
    attend = _attend(params, tokens.shape[-1], config, None, lambda state, weights: (*state, weights))
    _, weights = forward(params, tokens, attend, (), config=config)
    return jnp.stack(weights)


def _attend(
    params: Params,
    length: int,
    config: ModelConfig,
    max_len: int | None,
    keep: Callable[[Any, jax.Array], Any],
    sees: Callable[[int], jax.Array] | None = None,
) -> Attend:
    """Returns an `Attend` that updates its state by `keep(state, probabilities [..., N, T, T])` in each layer."""
    if any(layer.attention.pattern.num_repositioned_sinks for layer in config.layers):
        raise ValueError("dense attention supports sinks only at their own positions; the engine supports the others")
    positions = jnp.arange(length)
    ropes = layer_ropes(config, max_len or length)
    angles = {id(rope): rope.angles(positions) for rope in ropes}
    held: dict[int, tuple[jax.Array, jax.Array]] = {}  # by layer, for those that read them

    def attend(layer, q, k, v, state, indexed=None):
        spec, rope = config.layers[layer].attention, ropes[layer]
        q = grown(rope.rotate(q, angles[id(rope)]), positions, spec.query_growth)
        if k is not None:
            held[layer] = rope.rotate(k, angles[id(rope)]), v
        k, v = held[layer if config.kv_layers is None else config.kv_layers[layer]]
        grouped = q.reshape(*q.shape[:-2], spec.num_kv_heads, -1, spec.head_dim)
        scores = jnp.einsum("...tkgh,...ckh->...kgtc", grouped, k, preferred_element_type=jnp.float32) * spec.scale
        if spec.alibi is not None:
            scores += biases(jnp.array(spec.alibi), positions[:, None], positions[None], spec.num_kv_heads)
        visible = spec.pattern.visible(positions[:, None], positions)
        if sees is not None:
            visible = (visible & sees(layer))[:, None]
        if indexed is not None:
            chosen = _chosen(indexed.rotated(rope, angles[id(rope)], spec), visible, spec.latent.indexer.top_k)
            visible = visible & chosen[..., None, None, :, :]
        scores = scores if spec.soft_cap is None else soft_capped(scores, spec.soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        weights = _softmax(scores, sink_logits(params.layers[layer], spec))
        out = jnp.einsum("...kgtc,...ckh->...tkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        state = keep(state, weights.reshape(*weights.shape[:-4], -1, length, length))
        return out.reshape(q.shape).astype(q.dtype), state

    return attend


def _chosen(indexed: Indexed, visible: jax.Array, top_k: int) -> jax.Array:
    """Returns which keys an indexer chooses for each query: [..., T, T]. visible: [T, T]."""
    scores = jnp.where(visible, index_scores(indexed.q, indexed.weights, indexed.keys, jnp), -jnp.inf)
    _, at = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))
    return jnp.put_along_axis(jnp.zeros(scores.shape, bool), at, True, axis=-1, inplace=False)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax of scores [..., K, G, T, C] over C; sink logits [N], if any, are added to the denominator."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32).reshape(scores.shape[-4:-2])[..., None, None]
    scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    return jax.nn.softmax(scores, axis=-1)[..., :-1]
