"""Attention to latents: the products before and after it, see `core.layer_spec.LatentSpec`, and an indexer's; and gates
after attention. Knows no pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import AttentionSpec, LatentSpec, LayerSpec, NormSpec
from ksana_jax.models.operators import Operators, Projected
from ksana_jax.models.params import LayerParams
from ksana_jax.models.rope import Rope


class Indexed(NamedTuple):
    """Products of an indexer, see `core.layer_spec.IndexerSpec`. q: [..., Hi, Di]. weights: [..., Hi] float32, times
    (Hi * Di)^-.5. keys: [..., Di]."""

    q: jax.Array
    weights: jax.Array
    keys: jax.Array

    def rotated(self, rope: Rope, angles: tuple[jax.Array, jax.Array], spec: AttentionSpec) -> Indexed:
        """Rotates the first numbers of queries and keys, as many as of the layer's latents, by the same angles."""
        assert spec.latent is not None
        q, k = (rope.rotate_first(x, angles, spec.latent.rotated) for x in (self.q, self.keys[..., None, :]))
        return Indexed(q, self.weights, k[..., 0, :])


@jax.named_scope("qkv")
def project(
    x: jax.Array, p: LayerParams, spec: LayerSpec, operators: Operators, expands: bool = False
) -> Projected | tuple[jax.Array, jax.Array, jax.Array, Indexed]:
    """Normalises and projects hidden states x [..., D]: to queries [..., N, H] of latents, and to what the pool stores
    of tokens [..., 1, H], twice, as their keys and as their values; and to what its indexer reads, if it has one.

    Halves of the rotated numbers come before halves of the others, so that i is rotated with i + H/2.

    expands: queries are of expanded keys; zeros fill them up, until `expanded_queries`.
    """
    latent, normed = cast(LatentSpec, spec.attention.latent), operators.normed
    norms = dataclasses.replace(spec.norms, kind="rms", eps=latent.eps)
    w_q = p.w_q_plain if latent.query_rank is None else p.w_q_a
    q, compressed = _normed_products(x, p.attn_norm, spec.norms, [w_q, p.w_kv_a], operators)
    if latent.query_rank is not None:
        of_queries, (q,) = q, _normed_products(q, p.q_a_norm, norms, [p.w_q_b], operators)
    plain, turned = jnp.split(q.reshape(*x.shape[:-1], -1, latent.plain + latent.rotated), [latent.plain], axis=-1)
    if expands:
        of_rank = jnp.pad(plain, ((0, 0),) * (plain.ndim - 1) + ((0, latent.rank - latent.plain),))
    else:
        of_rank = _by_head(plain, _by_rank(p.w_uk, latent), operators)
    c, shared = jnp.split(compressed, [latent.rank], axis=-1)
    kv = _in_halves(shared, normed(c, p.kv_a_norm, norms), latent)[..., None, :]
    q = _in_halves(turned, of_rank, latent)
    if latent.indexer is None:
        return q, kv, kv
    of_index = normed(x, p.attn_norm, spec.norms), normed(of_queries, p.q_a_norm, norms)
    return q, kv, kv, _index(*of_index, p, latent, operators)


def _normed_products(x: jax.Array, norm: Any, norms: NormSpec, matrices: Any, operators: Operators) -> list[jax.Array]:
    fused = operators.normed_products
    if norm is not None and fused is not None and (found := fused(x, norm, norms, matrices)) is not None:
        return found
    normed = operators.normed(x, norm, norms)
    return [operators.linear(normed, w) for w in matrices]


def _index(x: jax.Array, of_queries: jax.Array, p: LayerParams, latent: LatentSpec, operators: Operators) -> Indexed:
    """Returns an indexer's products of the layer's input x [..., D] and of_queries [..., query_rank], normalised."""
    spec = latent.indexer
    assert spec is not None
    q = operators.linear(of_queries, p.w_index_q).reshape(*x.shape[:-1], spec.num_heads, spec.head_dim)
    keys = operators.normed(operators.linear(x, p.w_index_k), p.index_k_norm, NormSpec("layer", spec.eps, "before"))
    weights = operators.linear(x, p.w_index_weights, dtype=jnp.float32)
    return Indexed(q, weights * (spec.num_heads * spec.head_dim) ** -0.5, keys)


@jax.named_scope("output")
def values(attended: jax.Array, x: jax.Array, p: LayerParams, spec: LayerSpec, operators: Operators) -> jax.Array:
    """Returns each head's weighted sum of values [..., N, V] from that of what the pool stores [..., N, H]; without
    latents, times the gate of the layer's input x [..., D]."""
    if (latent := spec.attention.latent) is None:
        gate = operators.linear(operators.normed(x, p.attn_norm, spec.norms), p.w_out_gate)
        return attended * jax.nn.sigmoid(gate).reshape(attended.shape)
    w_uv = cast(jax.Array, p.w_uv).reshape(-1, latent.value, latent.rank)
    return _by_head(_parts(attended, latent)[1], w_uv, operators)


def expanded_queries(q: jax.Array, latent: LatentSpec) -> jax.Array:
    """Returns queries [..., N, expanded_dim] of expanded keys, from those of `project`, rotated."""
    turned, others = _parts(q, latent)
    return _filled(jnp.concatenate([others[..., : latent.plain], turned], axis=-1), latent)


def expansion(
    p: LayerParams, spec: LayerSpec, operators: Operators
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns a function of what the pool stores of tokens [C, H], to keys and values [C, N, expanded_dim] of all
    heads; zeros fill the shorter ones up."""
    latent, w_uk = cast(LatentSpec, spec.attention.latent), p.w_uk
    rows: Any = rows_of_heads(w_uk) if isinstance(w_uk, TransposedHeads) else w_uk
    matrices: Any = (rows, latent.plain), (p.w_uv, latent.value)

    def expand(stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned, c = _parts(stored, latent)
        keys, of_values = (operators.linear(c, w).reshape(len(c), -1, n) for w, n in matrices)
        turned = jnp.broadcast_to(turned[:, None], (*keys.shape[:2], latent.rotated))
        return _filled(jnp.concatenate([keys, turned], axis=-1), latent), _filled(of_values, latent)

    return expand


def _filled(x: jax.Array, latent: LatentSpec) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, latent.expanded_dim - x.shape[-1]),))


@flax.struct.dataclass
class TransposedHeads:
    """UK of all heads as products read it. by_rank: [N, rank, plain]."""

    by_rank: jax.Array


def transposed_heads(w_uk: jax.Array, num_heads: int) -> TransposedHeads:
    """Transposes UK [N*plain, rank] head by head, which XLA would do in each step of several tokens."""
    return TransposedHeads(w_uk.reshape(num_heads, -1, w_uk.shape[1]).swapaxes(1, 2))


def rows_of_heads(w_uk: TransposedHeads) -> jax.Array:
    """Undoes `transposed_heads`."""
    return w_uk.by_rank.swapaxes(1, 2).reshape(-1, w_uk.by_rank.shape[1])


def _by_rank(w_uk: Any, latent: LatentSpec) -> jax.Array:
    if isinstance(w_uk, TransposedHeads):
        return w_uk.by_rank
    return w_uk.reshape(-1, latent.plain, latent.rank).swapaxes(1, 2)


def _by_head(x: jax.Array, w: jax.Array, operators: Operators) -> jax.Array:
    """Multiplies x [..., N, in] by w [N, out, in]. Sums are in float32; XLA on CPUs has no batched products of bfloat16
    that give it."""
    return jnp.einsum("...NI,NOI->...NO", x, w) if operators.by_head is None else operators.by_head(x, w)


def _parts(x: jax.Array, latent: LatentSpec) -> tuple[jax.Array, jax.Array]:
    """Returns the rotated numbers and the others of vectors in halves [..., H]."""
    half, turned = x.shape[-1] // 2, latent.rotated // 2
    rotated = x[..., :turned], x[..., half : half + turned]
    others = x[..., turned:half], x[..., half + turned :]
    return jnp.concatenate(rotated, axis=-1), jnp.concatenate(others, axis=-1)


def _in_halves(rotated: jax.Array, others: jax.Array, latent: LatentSpec) -> jax.Array:
    """Returns [..., H]: half of the rotated numbers, half of the others, and the other halves."""
    if latent.interleaved:
        parts = rotated[..., 0::2], rotated[..., 1::2]
    else:
        parts = jnp.split(rotated, 2, axis=-1)
    first, second = jnp.split(others, 2, axis=-1)
    return jnp.concatenate([parts[0], first, parts[1], second], axis=-1)
