"""What a layer computes besides attention, as operators that have several implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import LayerSpec, NormSpec
from ksana_jax.models import layers
from ksana_jax.models.layers import Linear, Normalise
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.params import LayerParams


@dataclasses.dataclass(frozen=True)
class Operators:
    """Products with weights, norms, and the two parts of a layer that are made of them. Subclasses may fuse a part.

    linear: products with weights, with the contract of `layers.linear`.
    normaliser: gives the norm of a `NormSpec`, as the function `layers.normaliser` does.
    """

    linear: Linear = layers.linear
    normaliser: Callable[[NormSpec], Normalise] = layers.normaliser

    def embed(self, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
        """Looks up the rows [..., D] of tokens [...]."""
        return embedding[tokens]

    def summed(self, out: jax.Array) -> jax.Array:
        """Returns the sum of what all devices have computed of a product whose columns are divided among them."""
        return out

    def queries_keys_values(
        self, x: jax.Array, p: LayerParams, spec: LayerSpec
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalises and projects hidden states x [..., D] to q [..., N, H], k and v [..., K, H]."""
        norm = self.normaliser(spec.norms)
        with jax.named_scope("qkv"):
            normed = norm(x, p.attn_norm)
            if p.w_qkv is None:
                found = (
                    self.linear(normed, p.w_q, p.b_q),
                    self.linear(normed, p.w_k, p.b_k),
                    self.linear(normed, p.w_v, p.b_v),
                )
            else:
                found = (self.linear(normed, p.w_qkv, p.b_qkv),)
            return self.heads(found, p, spec)

    def heads(
        self, projected: tuple[jax.Array, ...], p: LayerParams, spec: LayerSpec
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Splits q [..., N*H], k and v [..., K*H], or all three in one array, into heads, and normalises q and k if the
        layer has such norms."""
        a = spec.attention
        split = [y.reshape(*y.shape[:-1], -1, a.head_dim) for y in projected]
        if len(split) == 1:
            split = jnp.split(split[0], (a.num_heads, a.num_heads + a.num_kv_heads), axis=-2)
        q, k, v = split
        if p.q_norm is not None and p.k_norm is not None:
            norm = self.normaliser(spec.norms)
            q, k = norm(q, p.q_norm), norm(k, p.k_norm)
        return q, k, v

    def after_attention(
        self, x: jax.Array, attended: jax.Array, p: LayerParams, spec: LayerSpec, following: LayerParams | None = None
    ) -> jax.Array:
        """Returns hidden states [..., D] after a layer, from those before it, x, and attention's result [..., N, H].

        Args:
          following: weights of the layer after it, where they are known: they may be brought nearer meanwhile.
        """
        norm, linear = self.normaliser(spec.norms), self.linear
        with jax.named_scope("output"):
            out = self.summed(linear(attended.reshape(*x.shape[:-1], -1), p.w_o, p.b_o))
            x = x + (out if p.post_attn_norm is None else norm(out, p.post_attn_norm))
        with jax.named_scope("mlp"):
            out = self.summed(mlp_kind(spec.mlp.kind).apply(norm(x, p.mlp_norm), p, linear))
            return x + (out if p.post_mlp_norm is None else norm(out, p.post_mlp_norm))


# Those of XLA, which run everywhere and have gradients.
XLA_OPERATORS = Operators()
