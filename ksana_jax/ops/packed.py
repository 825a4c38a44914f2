"""The operators of a layer with packed weights: two calls into C++ for each layer, besides attention."""

from __future__ import annotations

from typing import Any

import jax

from ksana_jax.core.layer_spec import LayerSpec, NormSpec
from ksana_jax.models.layers import norm_kind
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.operators import Operators
from ksana_jax.models.packed_matrix import PackedMatrix
from ksana_jax.models.params import LayerParams
from ksana_jax.native.layer import ACTIVATIONS, Norms, Weights, project, rest_of_layer


class PackedOperators(Operators):
    """Operators that fuse the parts of layers whose matrices are packed and whose norms and MLP C++ has."""

    def queries_keys_values(self, x: jax.Array, p: LayerParams, spec: LayerSpec):
        matrices: Any = p.w_q, p.w_k, p.w_v
        if (norms := _norms(spec.norms)) is None or not _are_packed(*matrices):
            return super().queries_keys_values(x, p, spec)
        biases = p.b_q, p.b_k, p.b_v
        with jax.named_scope("qkv"):
            found = project(x, list(map(Weights.of, matrices, biases)), norm=p.attn_norm, norms=norms)
            return self.heads(tuple(found), p, spec)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, p: LayerParams, spec: LayerSpec, following: LayerParams | None = None
    ) -> jax.Array:
        matrices: Any = p.w_o, p.w_gate, p.w_up, p.w_down
        norms, activation = _norms(spec.norms), mlp_kind(spec.mlp.kind).activation
        if norms is None or activation not in ACTIVATIONS or not _are_packed(*matrices):
            return super().after_attention(x, attended, p, spec, following)
        output, gate, up, down = map(Weights.of, matrices, (p.b_o, p.b_gate, p.b_up, p.b_down))
        weights = p.post_attn_norm, p.mlp_norm, p.post_mlp_norm
        with jax.named_scope("mlp"):
            flat = attended.reshape(*x.shape[:-1], -1)
            return rest_of_layer(x, flat, (output, gate, up, down), weights, norms, activation)


def _norms(spec: NormSpec) -> Norms | None:
    plus_one = norm_kind(spec.kind).plus_one
    return None if plus_one is None else Norms(spec.eps, plus_one)


def _are_packed(*matrices: Any) -> bool:
    return all(isinstance(w, PackedMatrix) for w in matrices)
