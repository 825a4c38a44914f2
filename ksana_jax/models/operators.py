"""Everything in a layer except attention, as operators with several implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import PARALLEL, LayerSpec, NormSpec
from ksana_jax.models import layers
from ksana_jax.models.block_matrix import Blocks
from ksana_jax.models.layers import Linear, Normalise
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.params import LayerParams

# q [..., N, H], k and v [..., K, H]; k and v are None in a layer that reads another's.
Projected = tuple[jax.Array, jax.Array | None, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Operators:
    """Products with weights, norms, and the two parts of a layer built from them. Subclasses may fuse a part.

    linear: products with weights, with the contract of `layers.linear`.
    normaliser: gives the norm of a `NormSpec`, as the function `layers.normaliser` does.
    grouped, by_head: `native_operators.grouped` of a stack of matrices, `native.grouped.by_head`; or None.
    normed_products: `ops.normed_products`, or None.
    real: which rows of a step are of tokens, bool [...], inside its program; None if all are.
    """

    linear: Linear = layers.linear
    normaliser: Callable[[NormSpec], Normalise] = layers.normaliser
    grouped: Callable[..., Callable[..., jax.Array] | None] | None = None
    by_head: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    normed_products: Callable[..., list[jax.Array] | None] | None = None
    real: jax.Array | None = None

    def embed(self, embedding: jax.Array | Blocks, tokens: jax.Array) -> jax.Array:
        """Looks up the rows [..., D] of tokens [...]."""
        return embedding.rows(tokens) if isinstance(embedding, Blocks) else embedding[tokens]

    def summed(self, out: jax.Array) -> jax.Array:
        """Sums the devices' results of a product whose columns are divided among them."""
        return out

    def of_heads(self, values: tuple[float, ...] | jax.Array) -> jax.Array:
        """Selects this device's query heads from values [N, ...] of each head of the model."""
        return jnp.array(values, jnp.float32)

    def queries_keys_values(self, x: jax.Array, p: LayerParams, spec: LayerSpec) -> Projected:
        """Normalises and projects hidden states x [..., D]."""
        with jax.named_scope("qkv"):
            normed = self.normed(x, p.attn_norm, spec.norms)
            parts = (p.w_q, p.b_q), (p.w_k, p.b_k), (p.w_v, p.b_v), (p.w_qkv, p.b_qkv)
            return self.heads([self.linear(normed, w, b) for w, b in parts if w is not None], p, spec)

    def heads(self, projected: Sequence[jax.Array], p: LayerParams, spec: LayerSpec) -> Projected:
        """Splits q [..., N*H], k and v [..., K*H], or all three in one array, or q alone, into heads, and normalises q
        and k if the layer has such norms, per head or over all heads."""
        a = spec.attention
        split: Any = [y.reshape(*y.shape[:-1], -1, a.head_dim) for y in projected]
        if len(split) == 1 and a.own_kv:
            split = jnp.split(split[0], (a.num_heads, a.num_heads + a.num_kv_heads), axis=-2)
        q, k, v = split if a.own_kv else (*split, None, None)
        q = self._normed_heads(self.normed(q, p.q_norm, spec.norms), p.q_proj_norm, spec.norms)
        if k is not None:
            k = self._normed_heads(self.normed(k, p.k_norm, spec.norms), p.k_proj_norm, spec.norms)
        return q, k, v

    def normed(self, x: jax.Array, weight: jax.Array | None, norms: NormSpec) -> jax.Array:
        """Normalises rows x [..., D]; returns them unchanged if the layer has no such norm (weight is None)."""
        return x if weight is None else self.normaliser(norms)(x, weight)

    def normed_projection(self, x: jax.Array, weight: jax.Array, norms: NormSpec) -> jax.Array:
        """Normalises rows [..., N*H] of all heads, which may be divided among devices."""
        return self.normaliser(norms)(x, weight)

    def _normed_heads(self, x: jax.Array, weight: jax.Array | None, norms: NormSpec) -> jax.Array:
        if weight is None:
            return x
        return self.normed_projection(x.reshape(*x.shape[:-2], -1), weight, norms).reshape(x.shape)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, p: LayerParams, spec: LayerSpec, following: LayerParams | None = None
    ) -> jax.Array:
        """Returns hidden states [..., D] after a layer, from its input x and attention's result [..., N, H].

        Args:
          following: weights of the next layer, if known: they may be prefetched meanwhile.
        """
        with jax.named_scope("output"):
            out = self.summed(self.linear(attended.reshape(*x.shape[:-1], -1), p.w_o, p.b_o))
            added = self.added(x, out, p.post_attn_norm, spec)
        with jax.named_scope("mlp"):
            return self.after_mlp(added, p, spec, x)

    def after_mlp(self, x: jax.Array, p: LayerParams, spec: LayerSpec, before: jax.Array) -> jax.Array:
        """Returns hidden states [..., D] after a layer's MLP, from those after and before its attention."""
        read, norm = (before if spec.norms.placement in PARALLEL else x), p.mlp_norm
        normed = self.normed(read, p.attn_norm if norm is None else norm, spec.norms)
        mlp = mlp_kind(spec.mlp.kind)
        more = (self.real, self.grouped) if mlp.routes else ()
        out = self.summed(mlp.apply(normed, p, self.linear, spec.mlp, *more))
        return self.added(x, out, p.post_mlp_norm, spec)

    def added(self, x: jax.Array, out: jax.Array, norm: jax.Array | None, spec: LayerSpec) -> jax.Array:
        """Adds the output of attention or MLP to hidden states x [..., D], normed and scaled as the layer specifies."""
        out = self.normed(out, norm, spec.norms)
        return x + (out if spec.residual_scale == 1 else out * spec.residual_scale)


# XLA's operators, which run everywhere and have gradients.
XLA_OPERATORS = Operators()
