"""Weights of latent attention from those of grouped queries, to be trained further. Knows no files.

The pairs of numbers that rotate fast stay rotated: at each frequency, all heads share the principal component of their
keys. The slow pairs lose their rotation, and form the latent together with the values, by a truncated singular value
decomposition. MHA2MLA (arXiv:2502.14837) has the parts of both, TransMLA (arXiv:2502.07864) the shared component.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.models.dense import dense_attend
from ksana_jax.models.layers import rms_norm
from ksana_jax.models.params import LayerParams, Params
from ksana_jax.models.transformer import embedded, run_layers


def to_latents(params: Params, found: ModelConfig, wanted: ModelConfig, texts: jax.Array) -> Params:
    """Returns the weights of `wanted`, a model of latents, from those of `found`.

    texts: [sequences, T], whose hidden states weigh the directions of the decomposition.

    Raises:
      ConfigError: the sizes of latents do not divide the heads of `found`, or its rope is another one.
    """
    latent, head_dim = wanted.latent, found.head_dim
    assert latent is not None
    theta = found.layers[0].attention.rope.theta ** (latent.rotated / head_dim)
    sizes = (latent.plain + latent.rotated, latent.value, wanted.layers[0].attention.rope.theta)
    if sizes[:2] != (head_dim, head_dim) or not math.isclose(sizes[2], theta, rel_tol=1e-6):
        raise ConfigError(
            f"latents of heads of {head_dim} need plain + rotated {head_dim}, value {head_dim} and rope_theta {theta:g}"
            f", not {sizes[0]}, {sizes[1]} and {sizes[2]:g}"
        )
    states = hidden_states(params, found, texts)
    layers = [_layer(p, found, wanted, x) for p, x in zip(params.layers, states, strict=True)]
    return dataclasses.replace(params, layers=tuple(layers))


def hidden_states(params: Params, config: ModelConfig, texts: jax.Array) -> list[jax.Array]:
    """Returns what each layer reads [sequences, T, D]."""
    x = embedded(params, texts, config=config)
    read = [x]

    def keep(layer, x):
        read.append(x)
        return x

    attend = dense_attend(params, texts.shape[-1], config=config)
    run_layers(params.layers, x, attend, None, specs=config.layers, after_layer=keep)
    return read[:-1]


def _layer(p: LayerParams, found: ModelConfig, wanted: ModelConfig, x: jax.Array) -> LayerParams:
    latent, d, kv, pairs = wanted.latent, found.d_model, found.num_kv_heads, found.head_dim // 2
    assert latent is not None and p.attn_norm is not None
    fast, group = latent.rotated // 2, found.num_heads // kv
    x = rms_norm(x, p.attn_norm, found.norm_eps).reshape(-1, d)
    of_tokens = x.T @ x / len(x)  # [D, D]
    w_q, w_k = (jnp.asarray(w).reshape(-1, 2, pairs, d) for w in (p.w_q, p.w_k))  # [heads, halves, pairs, D]

    # Each head's part of the principal component, [pairs, K].
    k = w_k[:, :, :fast]
    share = jnp.linalg.eigh(jnp.einsum("khfd,de,jhfe->fkj", k, of_tokens, k))[1][..., -1]
    of_pairs = jnp.einsum("fk,khfd->fhd", share, k)
    turned = jnp.einsum("fn,nhfd->nfhd", jnp.repeat(share, group, axis=1), w_q[:, :, :fast])
    plain = w_q[:, :, fast:].reshape(found.num_heads, -1, d)
    w_q_plain = jnp.concatenate([plain, turned.reshape(found.num_heads, -1, d)], axis=1)

    # W = U' C^-1/2 of the best approximation of W C^1/2 by rank r, C the second moments of tokens.
    kept = jnp.concatenate([w_k[:, :, fast:].reshape(-1, d), jnp.asarray(p.w_v)])
    values, vectors = jnp.linalg.eigh(of_tokens)
    root = jnp.sqrt(jnp.maximum(values, values[-1] * 1e-6))
    left, singular, right = jnp.linalg.svd(kept @ (vectors * root), full_matrices=False)
    down = (right[: latent.rank] / root) @ vectors.T  # [r, D]: the numbers of a latent have second moments of 1
    up = left[:, : latent.rank] * singular[: latent.rank]
    w_uk, w_uv = (
        jnp.repeat(part.reshape(kv, -1, latent.rank), group, axis=0).reshape(-1, latent.rank)
        for part in jnp.split(up, [kv * latent.plain])
    )
    return dataclasses.replace(
        p,
        **dict.fromkeys(("w_q", "w_k", "w_v")),
        w_q_plain=w_q_plain.reshape(-1, d),
        w_kv_a=jnp.concatenate([down, of_pairs.reshape(-1, d)]),
        kv_a_norm=jnp.ones(latent.rank),
        w_uk=w_uk,
        w_uv=w_uv,
    )
