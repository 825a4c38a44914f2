"""Matrices in blocks of codes, as in GGUF files: 16 or 32 neighbours of a row share a scale, perhaps a minimum too."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.models.matrix import Matrix, dot, finished
from ksana_jax.native.layer import Weights, project
from ksana_jax.native.shapes import BLOCK, PANEL, WORD_BYTES

# Subtracted from codes of 4 bits that have no minimum.
ZERO = 8


class Form(NamedTuple):
    """Storage of numbers in memory by type: as code * scale + minimum, or, without minima, code * scale.

    Files store some types in fewer bits. Codes of 5 and 6 bits, and levels of a table, have 8 here; where a file has
    scales of scales, their products are stored, in float32, which holds them exactly.

    bits: of a code. 4-bit codes are 0 to 15, from which `ZERO` is subtracted if there are no minima; 8-bit codes
      have a sign.
    group: numbers that share a scale, 16 or 32.
    scales: dtype of scales and minima.
    """

    bits: int
    has_minima: bool = False
    group: int = BLOCK
    scales: str = "float16"

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of a block of 32."""
        return BLOCK * self.bits // 8


# By GGUF's names; source: ggml, ggml-common.h. XLA takes scales of MXFP4 below 2**-126 for zero.
FORMS = {
    "Q4_0": Form(4),
    "Q4_1": Form(4, has_minima=True),
    "Q5_0": Form(8),
    "Q5_1": Form(8, has_minima=True),
    "Q8_0": Form(8),
    "Q2_K": Form(4, has_minima=True, group=16, scales="float32"),
    "Q3_K": Form(4, group=16, scales="float32"),
    "Q4_K": Form(4, has_minima=True, scales="float32"),
    "Q5_K": Form(8, has_minima=True, scales="float32"),
    "Q6_K": Form(8, group=16, scales="float32"),
    "IQ4_NL": Form(8),
    "MXFP4": Form(8, scales="float32"),
}


class Blocks(Matrix):
    """Shared by both forms in memory."""

    dtype: jnp.dtype

    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        return finished(dot(x, self.numbers().astype(x.dtype)), b, dtype or x.dtype)

    def numbers(self) -> jax.Array:
        """Returns the numbers [out, in] in `dtype`, rounded from exactly the values of `loading.gguf_blocks.decode`."""
        raise NotImplementedError

    def rows(self, indices: jax.Array) -> jax.Array:
        """Returns the numbers of rows, [..., in] in `dtype`; indices: [...]."""
        raise NotImplementedError


@flax.struct.dataclass
class BlockMatrix(Blocks):
    """A matrix [out, in] in blocks, in a form of `FORMS`. Products unpack it, in float32.

    dtype: of the numbers in products and looked up rows.
    """

    codes: jax.Array  # uint8 [out, in / 32, 16]: i in the low and i + 16 in the high half of byte i; or int8 [..., 32]
    scales: jax.Array  # float16 or float32 [out, in / group]
    minima: jax.Array | None  # as scales
    dtype: jnp.dtype = flax.struct.field(pytree_node=False)

    @classmethod
    def shapes(cls, shape: tuple[int, ...], kind: str, dtype) -> BlockMatrix:
        """Returns the shapes of a matrix [out, in] in a type of `FORMS`."""
        form, of_row = FORMS[kind], (shape[0], shape[1] // BLOCK)
        codes: Any = jax.ShapeDtypeStruct((*of_row, form.block_bytes), jnp.uint8 if form.bits == 4 else jnp.int8)
        scales: Any = jax.ShapeDtypeStruct((shape[0], shape[1] // form.group), jnp.dtype(form.scales))
        return cls(codes, scales, scales if form.has_minima else None, jnp.dtype(dtype))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * BLOCK

    def numbers(self) -> jax.Array:
        return _numbers(self.codes, self.scales, self.minima).astype(self.dtype)

    def rows(self, indices: jax.Array) -> jax.Array:
        minima = None if self.minima is None else self.minima[indices]
        return _numbers(self.codes[indices], self.scales[indices], minima).astype(self.dtype)


@flax.struct.dataclass
class PackedBlocks(Blocks):
    """`Blocks` in panels of 64 rows, the last one padded with zeros. Products round their input to codes, with a
    scale for each 32 neighbours of a row.

    A panel holds, block after block, the first word of each of its rows, then the second, and so on. A word has four
    bytes of codes; 8-bit codes are unsigned, and 128 is zero.
    """

    words: jax.Array  # int32 [ceil(out / 64), in / 32, 4 or 8, 64]
    scales: jax.Array  # float16 or float32 [ceil(out / 64), in / group, 64]
    minima: jax.Array | None  # as scales
    num_rows: int = flax.struct.field(pytree_node=False)
    dtype: jnp.dtype = flax.struct.field(pytree_node=False)
    stacks = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.words.shape[1] * BLOCK

    @property
    def sums(self) -> jax.Array | None:
        """The minima, under their name in `Weights`."""
        return self.minima

    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        return project(x, [Weights.of(self, b)], dtype=dtype)[0]

    def numbers(self) -> jax.Array:
        return unpacked_blocks(self).numbers()

    def rows(self, indices: jax.Array) -> jax.Array:
        panel, row = indices // PANEL, indices % PANEL
        codes = _codes(self.words[panel, :, :, row])
        minima = None if self.minima is None else self.minima[panel, :, row]
        return _numbers(codes, self.scales[panel, :, row], minima).astype(self.dtype)


def packed_blocks(w: BlockMatrix) -> PackedBlocks:
    """Packs a matrix in blocks."""
    num_rows, blocks, block_bytes = w.codes.shape
    panels = -(-num_rows // PANEL)

    def in_panels(x: jax.Array) -> jax.Array:
        """[out, blocks, ...] -> [panels, blocks, ..., 64]"""
        padded = jnp.pad(x, ((0, panels * PANEL - num_rows), *((0, 0),) * (x.ndim - 1)))
        return jnp.moveaxis(padded.reshape(panels, PANEL, *x.shape[1:]), 1, -1)

    codes = w.codes if w.codes.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(w.codes, jnp.uint8) ^ 128
    words = jax.lax.bitcast_convert_type(
        codes.reshape(num_rows, blocks, block_bytes // WORD_BYTES, WORD_BYTES), jnp.int32
    )
    minima = None if w.minima is None else in_panels(w.minima)
    return PackedBlocks(in_panels(words), in_panels(w.scales), minima, num_rows, w.dtype)


def unpacked_blocks(w: PackedBlocks) -> BlockMatrix:
    """Returns the matrix as it was before it was packed."""

    def in_rows(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, -1, 1).reshape(-1, *x.shape[1:-1])[: w.num_rows]

    minima = None if w.minima is None else in_rows(w.minima)
    return BlockMatrix(_codes(in_rows(w.words)), in_rows(w.scales), minima, w.dtype)


def _codes(words: jax.Array) -> jax.Array:
    """Returns codes as in `BlockMatrix`, [..., bytes], of words [..., words]."""
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
    return codes if codes.shape[-1] < BLOCK else jax.lax.bitcast_convert_type(codes ^ 128, jnp.int8)


def _numbers(codes: jax.Array, scales: jax.Array, minima: jax.Array | None) -> jax.Array:
    """Returns the numbers [..., in] of blocks in float32. A scale times a code has 24 bits at most: it is exact, so the
    sum is rounded once, whether or not a compiler fuses the two."""
    if codes.dtype == jnp.uint8:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
    found = codes.astype(jnp.float32) - (ZERO if minima is None and codes.dtype == jnp.uint8 else 0)
    found = found.reshape(*scales.shape, -1) * scales[..., None].astype(jnp.float32)
    if minima is not None:
        found += minima[..., None].astype(jnp.float32)
    return found.reshape(*found.shape[:-2], -1)
