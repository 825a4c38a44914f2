"""The network written again in float64 NumPy, one whole text at a time: no cache, no blocks, no jax. Every pattern is
the literal definition: a mask, and for each pair of query and key the position at which the query stands."""

from __future__ import annotations

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import AttentionPattern, per_layer


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def _rotate(x, positions, theta):
    """x [..., H] at integer positions of shape x.shape[:-1]."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions, np.float64)[..., None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def reference_logprobs(
    params,
    config: ModelConfig,
    tokens,
    pattern=None,
    in_cache=None,
    stored=None,
    attention=None,
    exact=None,
    unrotated=False,
    selects=None,
    hidden=False,
    steering=None,
) -> np.ndarray:
    """Log-probabilities [T, V] of what follows each token of a text [T].

    Args:
      pattern: one, one for each layer, or one for each kv head of each layer; None takes the model's own.
      in_cache: [L, T, T] bool, tokens that a layer has not evicted when a query attends to its cache; None evicts none.
      stored: what a cache makes of rotated keys, or of values [T, K, H]; None keeps them as they are.
      unrotated: whether `stored` gets keys before the rotation.
      exact: [T, T] bool, whether a query (first axis) reads a token as it is, whatever is stored; None for no query.
      selects: (layer, q [T, N, H], k [T, K, H]) -> [N, T, T] bool, keys that each query reads, of those that it may; q
        and k are rotated, q is scaled. None reads all.
      attention: a list to which the probabilities [T, T] of each head of each layer are appended, in order.
      steering: ({layer: vector [D]}, {layer: heads}), added to hidden states after it, and without a result in it.
      hidden: True returns the hidden states [T, D] after the last norm instead.
    """
    patterns = per_layer(config.pattern if pattern is None else pattern, config.num_layers, config.num_kv_heads)

    def f64(a):
        return np.asarray(a, np.float64)

    t = len(tokens)
    i, j = np.arange(t)[:, None], np.arange(t)[None, :]
    x = f64(params.embed)[np.asarray(tokens)]
    heads, kv_heads, h = config.num_heads, config.num_kv_heads, config.head_dim
    of_layer, stored_by = len(patterns) // config.num_layers, {}
    for index, (p, layer) in enumerate(zip(params.layers, config.layers, strict=True)):
        spec = layer.attention
        y = _norm(x, f64(p.attn_norm), config.norm_eps)
        q = (y @ f64(p.w_q).T).reshape(t, heads, h)
        if (source := index if config.kv_layers is None else config.kv_layers[index]) == index:
            stored_by[index] = [(y @ f64(w).T).reshape(t, kv_heads, h) for w in (p.w_k, p.w_v)]
        k, v = stored_by[source]
        positions = np.arange(t)[:, None] + np.zeros((1, kv_heads))
        plain, k = k, _rotate(k, positions, spec.rope.theta)
        exact_k, exact_v = (np.repeat(x, heads // kv_heads, 1) for x in (k, v))
        if stored is not None:
            k, v = _rotate(stored(plain), positions, spec.rope.theta) if unrotated else stored(k), stored(v)
        k, v = (np.repeat(x, heads // kv_heads, 1) for x in (k, v))
        read = np.zeros((t, t), bool) if exact is None else exact
        chosen = np.ones((heads, t, t), bool)
        if selects is not None:
            turned = _rotate(q * spec.scale, np.arange(t)[:, None] + np.zeros((1, heads)), spec.rope.theta)
            chosen = selects(index, turned, exact_k[:, :: heads // kv_heads])
        sink_logits = f64(p.sink_logits) if spec.sinks == "learned" else np.zeros(heads)
        out = np.zeros((t, heads, h))
        for n in range(heads):
            mask, stands = literal(patterns[index * of_layer + n * of_layer // heads], i, j)
            if in_cache is not None:
                mask = mask & in_cache[index]
            q_ij = _rotate(np.broadcast_to(q[:, None, n], (t, t, h)), stands, spec.rope.theta)
            k_ij = np.where(read[:, :, None], exact_k[None, :, n], k[None, :, n])
            biases = 0 if spec.alibi is None else spec.alibi[n] * (j - stands)
            scores = np.where(
                mask & chosen[n], _capped((q_ij * k_ij).sum(-1) * spec.scale + biases, spec.soft_cap), -np.inf
            )
            top = scores.max(-1, keepdims=True)
            w = np.exp(scores - top)
            sink = 0 if spec.sinks is None else np.exp(sink_logits[n] - top)
            w = w / (w.sum(-1, keepdims=True) + sink)
            out[:, n] = (w * ~read) @ v[:, n] + (w * read) @ exact_v[:, n]
            if attention is not None:
                attention.append(w)
        vectors, heads_off = steering or ({}, {})
        out[:, list(heads_off.get(index, ()))] = 0
        x = x + out.reshape(t, -1) @ f64(p.w_o).T
        y = _norm(x, f64(p.mlp_norm), config.norm_eps)
        gate = y @ f64(p.w_gate).T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ f64(p.w_up).T)) @ f64(p.w_down).T
        x = x + f64(vectors.get(index, 0))
    x = _norm(x, f64(params.final_norm), config.norm_eps)
    if hidden:
        return x
    z = x @ f64(params.embed if params.head is None else params.head).T
    z = _capped(z, config.logit_soft_cap)
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def literal(p: AttentionPattern, i, j):
    """The definition of `AttentionPattern`, word for word: who is visible [T, T], and where the query stands [T, T]."""
    near = (i - j < (p.window or 10**9)) & ((i - j) % p.stride == 0)
    sink = j < p.num_sinks
    everywhere = (j % p.global_every == 0) if p.global_every else np.zeros_like(near)
    stands = i + 0 * j
    if p.sink_position == "cache":
        stands = np.where(sink, np.minimum(i, p.num_sinks + p.window - 1), stands)
    if p.sink_position == "ceiling":
        ceiling = p.sink_ceiling or p.window
        stands = np.where(sink & (i - j >= p.window), j + np.minimum(i - j, ceiling), stands)
    return (j <= i) & (near | sink | everywhere), stands
