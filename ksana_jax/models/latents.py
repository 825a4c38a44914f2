"""Attention to latents: the products before and after it, see `core.layer_spec.LatentSpec`. Knows no pool."""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import LatentSpec, LayerSpec
from ksana_jax.models.operators import Operators, Projected
from ksana_jax.models.params import LayerParams


@jax.named_scope("qkv")
def project(x: jax.Array, p: LayerParams, spec: LayerSpec, operators: Operators) -> Projected:
    """Normalises and projects hidden states x [..., D]: to queries [..., N, H] of latents, and to what the pool stores
    of tokens [..., 1, H], twice, as their keys and as their values.

    Halves of the rotated numbers come before halves of the others, so that i is rotated with i + H/2.
    """
    latent, linear, normed = cast(LatentSpec, spec.attention.latent), operators.linear, operators.normed
    norms, w_uk = dataclasses.replace(spec.norms, kind="rms", eps=latent.eps), cast(jax.Array, p.w_uk)
    x = normed(x, p.attn_norm, spec.norms)
    if latent.query_rank is None:
        q = linear(x, p.w_q_plain)
    else:
        q = linear(normed(linear(x, p.w_q_a), p.q_a_norm, norms), p.w_q_b)
    plain, turned = jnp.split(q.reshape(*x.shape[:-1], -1, latent.plain + latent.rotated), [latent.plain], axis=-1)
    # Sums are in float32; XLA on CPUs has no batched products of bfloat16 that give it.
    of_rank = jnp.einsum("...NP,NPR->...NR", plain, w_uk.reshape(-1, latent.plain, latent.rank))
    c, shared = jnp.split(linear(x, p.w_kv_a), [latent.rank], axis=-1)
    kv = _in_halves(shared, normed(c, p.kv_a_norm, norms), latent)[..., None, :]
    return _in_halves(turned, of_rank, latent), kv, kv


@jax.named_scope("output")
def values(attended: jax.Array, p: LayerParams, latent: LatentSpec) -> jax.Array:
    """Returns each head's weighted sum of values [..., N, V] from that of what the pool stores [..., N, H]."""
    half, w_uv = attended.shape[-1] // 2, cast(jax.Array, p.w_uv)
    halves = attended[..., latent.rotated // 2 : half], attended[..., half + latent.rotated // 2 :]
    return jnp.einsum("...NR,NVR->...NV", jnp.concatenate(halves, axis=-1), w_uv.reshape(-1, latent.value, latent.rank))


def _in_halves(rotated: jax.Array, others: jax.Array, latent: LatentSpec) -> jax.Array:
    """Returns [..., H]: half of the rotated numbers, half of the others, and the other halves."""
    if latent.interleaved:
        parts = rotated[..., 0::2], rotated[..., 1::2]
    else:
        parts = jnp.split(rotated, 2, axis=-1)
    first, second = jnp.split(others, 2, axis=-1)
    return jnp.concatenate([parts[0], first, parts[1], second], axis=-1)
