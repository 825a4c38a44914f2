"""Packs matrices into the order that a processor's vectors read (`native_operators.PackedMatrix`), and unpacks them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.block_matrix import BlockMatrix, Blocks, PackedBlocks, packed_blocks, unpacked_blocks
from ksana_jax.models.int8_matrix import Int8Matrix
from ksana_jax.models.latents import TransposedHeads, rows_of_heads, transposed_heads
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.params import Params, weight_fields, weights_of
from ksana_jax.native.shapes import PANEL, WORD_BYTES
from ksana_jax.ops.native_operators import PackedMatrix


def can_pack(w: Any) -> bool:
    """True if this is a matrix of numbers or of `Int8Matrix`, and each of its rows a whole number of words, or a
    `BlockMatrix` of integers, or a stack of these."""
    if isinstance(w, BlockMatrix):
        return not w.is_float
    numbers = w.codes if isinstance(w, Int8Matrix) else w
    if isinstance(numbers, Matrix) or len(numbers.shape) != 2:
        return False
    return numbers.shape[1] * numbers.dtype.itemsize % WORD_BYTES == 0


@jax.jit
def pack(w: jax.Array | Int8Matrix | BlockMatrix) -> PackedMatrix | PackedBlocks:
    """Packs a matrix [out, in], whose rows must be a whole number of words."""
    if isinstance(w, BlockMatrix):
        return packed_blocks(w)
    numbers, scales = (w.codes, w.scales) if isinstance(w, Int8Matrix) else (w, None)
    rows, columns = numbers.shape
    panels, per_word = -(-rows // PANEL), WORD_BYTES // numbers.dtype.itemsize
    padded = jnp.pad(numbers, ((0, panels * PANEL - rows), (0, 0)))
    words = padded.reshape(panels, PANEL, columns // per_word, per_word).transpose(0, 2, 1, 3)
    sums = numbers.astype(jnp.int32).sum(axis=1) if isinstance(w, Int8Matrix) and w.rounds_inputs else None
    return PackedMatrix(words, scales, sums, rows)


def unpack(w: jax.Array | Matrix) -> jax.Array | Matrix:
    """Returns the matrix as it was before it was packed."""
    if isinstance(w, PackedBlocks):
        return _on_each_device(unpacked_blocks, w)(w)
    if not isinstance(w, PackedMatrix):
        return w
    numbers = w.words.transpose(0, 2, 1, 3).reshape(-1, w.shape[1])[: w.num_rows]
    return numbers if w.scales is None else Int8Matrix(numbers, w.scales, w.sums is not None)


def numbers(w: jax.Array | Matrix) -> jax.Array:
    """Returns the numbers of a matrix in memory, float32 [out, in]."""
    w = unpack(w)
    if isinstance(w, Int8Matrix):
        return w.codes * w.scales[:, None]
    if isinstance(w, Blocks):
        return w.numbers().astype(jnp.float32)
    # A form that is not known here multiplies by 1.
    return w.multiply(jnp.eye(w.shape[1])).T if isinstance(w, Matrix) else w.astype(jnp.float32)


def packed(params: Params, config: ModelConfig, *, consume: bool = False, only_blocks: bool = False) -> Params:
    """Packs the matrices of layers and the output head, which may be the embedding. Matrices of MLPs that do not state
    that they are read through `linear` alone (`MLP.quantises`) stay, as does an embedding that is only looked up.

    Args:
      params: weights, or their shapes.
      consume: deletes each array once it is packed, so that the extra memory is one matrix.
      only_blocks: leaves matrices as they are unless they are in blocks, as several devices need it.
    """
    abstract = isinstance(params.final_norm, jax.ShapeDtypeStruct)

    def of(w: Any) -> Any:
        if not can_pack(w) or (only_blocks and not isinstance(w, BlockMatrix)):
            return w
        if abstract:
            return jax.eval_shape(_on_each_device(pack, w), w)
        made = jax.block_until_ready(_on_each_device(pack, w)(w))
        if consume:
            for array in jax.tree.leaves(w)[: None if isinstance(w, BlockMatrix) else 1]:
                array.delete()  # its numbers; its vectors stay in use
        return made

    layers = []
    for p, spec in zip(params.layers, config.layers, strict=True):
        mlp = mlp_kind(spec.mlp.kind)
        p = _changed(p, of, () if mlp.quantises else mlp.shapes(config.d_model, spec.mlp))
        w_uk: Any = p.w_uk
        if w_uk is not None and not isinstance(w_uk, TransposedHeads) and not only_blocks:
            transpose = jax.jit(functools.partial(transposed_heads, num_heads=spec.attention.num_heads))
            p = p.replace(w_uk=jax.eval_shape(transpose, w_uk) if abstract else jax.block_until_ready(transpose(w_uk)))
            if consume and not abstract:
                w_uk.delete()
        layers.append(p)
    embed = params.embed if params.head is not None else of(params.embed)
    return _changed(params, of).replace(embed=embed, layers=tuple(layers))


def _on_each_device(change: Callable[[Any], Any], w: Any) -> Callable[[Any], Any]:
    """Returns a compiled function, of each device's part of a matrix if several devices divide it."""
    sharding = getattr(jax.tree.leaves(w)[0], "sharding", None)  # weights that are traced have none
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return change
    return jax.jit(
        jax.shard_map(change, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
    )


def unpacked(params: Params) -> Params:
    """Returns weights as they were before `packed`."""
    layers = [_changed(p, unpack) for p in params.layers]
    layers = tuple(p.replace(w_uk=rows_of_heads(p.w_uk)) if isinstance(p.w_uk, TransposedHeads) else p for p in layers)
    return _changed(params, unpack).replace(embed=unpack(params.embed), layers=layers)


def _changed(weights: Any, change: Callable[[Any], Any], apart: Container[str] = ()) -> Any:
    """Returns the weights of a layer, or of Params without its layers, with those changed that may be packed.

    Args:
      apart: fields that stay as they are.
    """
    stated = weight_fields()
    packs = {name: w for name, w in weights_of(weights).items() if (of := stated[name]) is not None and of.packs}
    return weights.replace(**{name: change(w) for name, w in packs.items() if name not in apart})
