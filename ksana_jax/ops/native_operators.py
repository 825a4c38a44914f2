"""Operators of CPUs: products with weights and norms in C++, and of layers with packed weights, attention excluded, two
calls into C++ each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from ksana_jax.core.layer_spec import PARALLEL, LayerSpec, NormSpec
from ksana_jax.models import layers
from ksana_jax.models.block_matrix import BlockMatrix, PackedBlocks
from ksana_jax.models.int8_matrix import Int8Matrix
from ksana_jax.models.layers import NORMS, Normalise
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.mlp import MLPS
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import LayerParams
from ksana_jax.native import operators as native
from ksana_jax.native.grouped import grouped_blocks, grouped_linear
from ksana_jax.native.operators import ACTIVATIONS, Norms, Weights, project, rest_of_layer
from ksana_jax.native.shapes import PANEL

# Rows up to which native products are faster than XLA's: 1.4 to 2.4 times with 8 rows, 1.1 to 1.5 with 32, 0.9 to 1.4
# with 64, and 0.6 to 1.1 with 128 and more (weights of 256 KiB to 16 MiB, both types, two cores of Zen 4, jax 0.10.2).
FEW_ROWS = 64


def linear(x: jax.Array, w: jax.Array | Matrix, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    """Multiplies by matrices as they are given; the contract of `models.layers.linear`."""
    if isinstance(w, BlockMatrix) and w.is_float:
        return native.linear(x, w.codes.reshape(w.shape), b, dtype=dtype, scales=w.scales)
    if isinstance(w, BlockMatrix):
        return native.linear(x, w.numbers().astype(x.dtype), b, dtype=dtype)
    if isinstance(w, Int8Matrix) and not w.rounds_inputs:
        return native.linear(x, w.codes, b, dtype=dtype, scales=w.scales)
    return w.multiply(x, b, dtype=dtype) if isinstance(w, Matrix) else native.linear(x, w, b, dtype=dtype)


def linear_of_few_rows(x: jax.Array, w: jax.Array | Matrix, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    """Multiplies few rows as `linear` does; XLA multiplies more."""
    return (linear if x.size // x.shape[-1] <= FEW_ROWS else layers.linear)(x, w, b, dtype=dtype)


def grouped(w: jax.Array | Matrix) -> Callable[..., jax.Array] | None:
    """Returns the products of rows that are sorted by expert with a stack of matrices [E, out, in].

    Returns:
      (x [P, in], counts=[E], b=[P, out] or None) -> [P, out], see `native.grouped`; None if the matrices are neither
      numbers, nor codes of `int8`, nor blocks of floats or packed ones.
    """
    if isinstance(w, BlockMatrix) and w.is_float:
        return functools.partial(grouped_linear, w=w.codes.reshape(w.shape), scales=w.scales)
    if isinstance(w, PackedBlocks):
        return functools.partial(grouped_blocks, w=w)
    if isinstance(w, Int8Matrix) and not w.rounds_inputs:
        return functools.partial(grouped_linear, w=w.codes, scales=w.scales)
    return None if isinstance(w, Matrix) else functools.partial(grouped_linear, w=w)


def normaliser(spec: NormSpec) -> Normalise:
    """Returns the function that applies a layer's norms; the contract of `models.layers.normaliser`."""
    plus_one = NORMS[spec.kind].plus_one
    apply = native.layer_norm if plus_one is None else functools.partial(native.rms_norm, plus_one=plus_one)
    return jax.named_scope("norm")(functools.partial(apply, eps=spec.eps))


@flax.struct.dataclass
class PackedMatrix(Matrix):
    """A matrix [out, in] in panels of 64 rows, the last one filled up with zeros.

    A panel holds the first word of each of its rows, then the second of each, and so on. A word has 32 bits:
    as many numbers of a row as fit.
    """

    words: jax.Array  # [ceil(out / 64), in / p, 64, p] with p numbers of a word; int8 where they are codes
    scales: jax.Array | None  # float32 [out], of codes
    sums: jax.Array | None  # int32 [out], of a row's codes where inputs are rounded to codes as well
    num_rows: int = flax.struct.field(pytree_node=False)
    stacks = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.words.shape[1] * self.words.shape[3]

    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        return project(x, [Weights.of(self, b)], dtype=dtype)[0]


def _rows(table: jax.Array, *at: Any) -> jax.Array:
    """Returns table[at]. 16 bits move as integers: XLA on CPUs would widen the whole table to float32."""
    x = table if table.dtype.itemsize != 2 else jax.lax.bitcast_convert_type(table, "uint16")
    return jax.lax.bitcast_convert_type(x[at], table.dtype)


class PackedOperators(Operators):
    """Operators that fuse the parts of layers with packed matrices, and norms and MLPs that C++ supports."""

    def embed(self, embedding: jax.Array | PackedMatrix, tokens: jax.Array) -> jax.Array:
        if isinstance(embedding, PackedMatrix):
            return _rows(embedding.words, tokens // PANEL, slice(None), tokens % PANEL).reshape(*tokens.shape, -1)
        return _rows(embedding, tokens) if isinstance(embedding, jax.Array) else super().embed(embedding, tokens)

    def queries_keys_values(self, x: jax.Array, p: LayerParams, spec: LayerSpec):
        parts: Any = [(p.w_q, p.b_q), (p.w_k, p.b_k), (p.w_v, p.b_v)][: 3 if spec.attention.own_kv else 1]
        if (norms := norms_of(spec.norms)) is None or not are_packed(*(w for w, _ in parts)):
            return super().queries_keys_values(x, p, spec)
        with jax.named_scope("qkv"):
            found = project(x, [Weights.of(w, b) for w, b in parts], norm=p.attn_norm, norms=norms)
            return self.heads(found, p, spec)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, p: LayerParams, spec: LayerSpec, following: LayerParams | None = None
    ) -> jax.Array:
        matrices: Any = p.w_o, p.w_gate, p.w_up, p.w_down
        norms, activation = norms_of(spec.norms), MLPS[spec.mlp.kind].activation
        packed = are_packed(*matrices) and spec.residual_scale == 1 and spec.norms.placement not in PARALLEL
        if norms is None or activation not in ACTIVATIONS or not packed:
            return super().after_attention(x, attended, p, spec, following)
        output, gate, up, down = map(Weights.of, matrices, (p.b_o, p.b_gate, p.b_up, p.b_down))
        weights = p.post_attn_norm, p.mlp_norm, p.post_mlp_norm
        with jax.named_scope("mlp"):
            flat = attended.reshape(*x.shape[:-1], -1)
            return rest_of_layer(x, flat, (output, gate, up, down), weights, norms, activation)


def norms_of(spec: NormSpec) -> Norms | None:
    plus_one = NORMS[spec.kind].plus_one
    return None if plus_one is None else Norms(spec.eps, plus_one)


def are_packed(*matrices: Any) -> bool:
    """True if one call takes them: all are packed, and either all or none in blocks."""
    return len(kinds := {type(getattr(w, "base", w)) for w in matrices}) == 1 and kinds <= {PackedMatrix, PackedBlocks}
