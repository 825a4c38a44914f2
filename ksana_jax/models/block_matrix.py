"""Matrices in blocks of codes, as in GGUF files: 16 to 128 neighbours of a row share a scale, perhaps a minimum too."""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.models.matrix import Matrix, dot, finished
from ksana_jax.native.blocks import SUPERBLOCK, Form
from ksana_jax.native.operators import Weights, project
from ksana_jax.native.shapes import BLOCK, PANEL, WORD_BYTES

# By GGUF's names; source: ggml, ggml-common.h. XLA takes scales of MXFP4 below 2**-126 for zero.
FORMS = {
    "Q4_0": Form(4),
    "Q4_1": Form(4, has_minima=True),
    "Q5_0": Form(5),
    "Q5_1": Form(5, has_minima=True),
    "Q8_0": Form(8),
    "Q2_K": Form(4, has_minima=True, group=16, scales="int8"),
    "Q3_K": Form(4, group=16, scales="int8"),
    "Q4_K": Form(4, has_minima=True, scales="int8"),
    "Q5_K": Form(5, has_minima=True, scales="int8"),
    "Q6_K": Form(6, group=16, scales="int8"),
    "IQ4_NL": Form(8),
    "MXFP4": Form(8, scales="float32"),
}
# Quantised safetensors: symmetric with scales of float16, with wider ones, or with zeros, whose products need float32.
FORMS |= {f"int{bits}": Form(bits) for bits in (4, 8)}
FORMS |= {f"int{bits}_f32": Form(bits, scales="float32") for bits in (4, 8)}
FORMS |= {f"int{bits}_zeros": Form(bits, has_minima=True, scales="float32") for bits in (4, 8)}
# float8_e4m3fn, whose blocks of 128 x 128 numbers share a scale in files; each row has it here, and may move alone.
FORMS |= {name: Form(8, group=group, scales="float32", is_float=True) for name, group in (("fp8", 128), ("fp8_32", 32))}


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

    All arrays of a stack of such matrices [E, out, in], of experts, have that axis first.

    dtype: of the numbers in products and looked up rows.
    """

    codes: jax.Array  # uint8 [out, in / 32, 16, 20 or 24], see `code_levels`; or int8 or float8_e4m3fn [..., 32]
    scales: jax.Array  # float16, float32 or int8 [out, in / group]
    minima: jax.Array | None  # as scales
    dtype: jnp.dtype = flax.struct.field(pytree_node=False)
    factors: jax.Array | None = None  # float16 [out, in / 256, 1, or 2 with minima], of scales and minima in int8

    @classmethod
    def shapes(cls, shape: tuple[int, ...], kind: str, dtype) -> BlockMatrix:
        """Returns the shapes of a matrix [out, in], or a stack of them, in a type of `FORMS`."""
        form, (*rows, width) = FORMS[kind], shape
        of_codes = (*rows, width // BLOCK, form.block_bytes)
        codes: Any = jax.ShapeDtypeStruct(of_codes, form.codes)
        scales: Any = jax.ShapeDtypeStruct((*rows, width // form.group), jnp.dtype(form.scales))
        factors: Any = None
        if form.has_factors:
            factors = jax.ShapeDtypeStruct((*rows, width // SUPERBLOCK, 1 + form.has_minima), jnp.float16)
        return cls(codes, scales, scales if form.has_minima else None, jnp.dtype(dtype), factors)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-2], self.codes.shape[-2] * BLOCK

    @property
    def is_float(self) -> bool:
        """True if codes are floats, which are not packed."""
        return self.codes.dtype == jnp.float8_e4m3fn

    @property
    def form(self) -> Form:
        bits, group = self.codes.shape[-1] * 8 // BLOCK, self.shape[-1] // self.scales.shape[-1]
        return Form(bits, self.minima is not None, group, self.scales.dtype.name, self.is_float)

    def numbers(self) -> jax.Array:
        # A factor times a scale times a code has 24 bits at most and is exact in float32, so the sum is rounded once,
        # whether or not a compiler fuses the two.
        codes, bits, zero = self.codes, self.codes.shape[-1] * 8 // BLOCK, 0
        if bits < 8:
            low, high, more = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :], bits - 4
            zero = 0 if self.minima is not None else zero_of(bits)
            codes = jnp.concatenate([low & 15, low >> 4], axis=-1)
            if more:
                high = high.reshape(*high.shape[:-1], more, 1, WORD_BYTES) >> _shifts(more) & (2**more - 1)
                codes |= high.reshape(codes.shape) << 4
        found = (codes.astype(jnp.float32) - zero).reshape(*self.scales.shape, -1) * self._widened(self.scales, 0)
        if self.minima is not None:
            found += self._widened(self.minima, 1)
        return found.reshape(*found.shape[:-2], -1).astype(self.dtype)

    def _widened(self, x: jax.Array, factor: int) -> jax.Array:
        """Returns scales or minima [..., in / group, 1] in float32, times one of the factors if there are any."""
        wide = x.astype(jnp.float32)
        if self.factors is not None:
            factors = self.factors[..., factor, None].astype(jnp.float32)
            wide = (wide.reshape(*factors.shape[:-1], -1) * factors).reshape(x.shape)
        return wide[..., None]

    def rows(self, indices: jax.Array) -> jax.Array:
        return jax.tree.map(lambda x: x[indices], self).numbers()


@flax.struct.dataclass
class PackedBlocks(Blocks):
    """`Blocks` in panels of 64 rows, the last one padded with zeros. Products round their input to codes, with a
    scale for each 32 neighbours of a row.

    A panel holds the arrays of `Form.of_row`, one after the other: of each, the first number of all rows, then the
    second, and so on. A word has four bytes of codes; 8-bit codes are unsigned, and 128 is zero. They are bytes of one
    array because a program takes longer to start with more arrays.
    """

    data: jax.Array  # uint8 [ceil(out / 64), bytes of a panel]; a stack of matrices has its axis first
    num_rows: int = flax.struct.field(pytree_node=False)  # of one device, as is the width
    width: int = flax.struct.field(pytree_node=False)
    form: Form = flax.struct.field(pytree_node=False)
    dtype: jnp.dtype = flax.struct.field(pytree_node=False)
    stacks = False

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.data.shape[:-2], self.num_rows, self.width

    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        return project(x, [Weights.of(self, b)], dtype=dtype)[0]

    def numbers(self) -> jax.Array:
        return unpacked_blocks(self).numbers()

    def rows(self, indices: jax.Array) -> jax.Array:
        return _unpacked_rows(self, indices).numbers()


def packed_blocks(w: BlockMatrix) -> PackedBlocks:
    """Packs a matrix in blocks, or a stack of them."""
    if w.codes.ndim > 3:
        return jax.vmap(packed_blocks)(w)
    num_rows, blocks, _ = w.codes.shape
    panels = -(-num_rows // PANEL)

    def in_panels(x: jax.Array) -> jax.Array:
        """[out, ...] -> uint8 [panels, bytes]"""
        padded = jnp.pad(x, ((0, panels * PANEL - num_rows), *((0, 0),) * (x.ndim - 1)))
        ordered = jnp.moveaxis(padded.reshape(panels, PANEL, *x.shape[1:]), 1, -1)
        return jax.lax.bitcast_convert_type(ordered, jnp.uint8).reshape(panels, -1)

    codes = w.codes if w.codes.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(w.codes, jnp.uint8) ^ 128
    words = jax.lax.bitcast_convert_type(codes.reshape(num_rows, blocks, -1, WORD_BYTES), jnp.int32)
    arrays = [in_panels(x) for x in (words, w.scales, w.minima, w.factors) if x is not None]
    return PackedBlocks(jnp.concatenate(arrays, axis=1), num_rows, blocks * BLOCK, w.form, w.dtype)


@jax.jit
def unpacked_blocks(w: PackedBlocks) -> BlockMatrix:
    """Returns the matrix as it was before it was packed."""
    if w.data.ndim > 2:
        return jax.vmap(unpacked_blocks)(w)
    return _unpacked_rows(w, jnp.arange(w.num_rows))


def _unpacked_rows(w: PackedBlocks, rows: jax.Array) -> BlockMatrix:
    panel, row = (x[..., None, None] for x in (rows // PANEL, rows % PANEL))
    found, start = [], 0
    for dtype, shape in w.form.of_row(w.width):
        count, size = math.prod(shape), dtype.itemsize
        read = w.data[panel, start + np.arange(count)[:, None] * PANEL * size + np.arange(size) + row * size]
        numbers = jax.lax.bitcast_convert_type(read if size > 1 else read[..., 0], dtype)
        found.append(numbers.reshape(*rows.shape, *shape))
        start += count * PANEL * size
    words, scales, *more = found
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
    if w.form.bits == 8:
        codes = jax.lax.bitcast_convert_type(codes ^ 128, jnp.int8)
    minima = more.pop(0) if w.form.has_minima else None
    return BlockMatrix(codes, scales, minima, w.dtype, more[0] if more else None)


def zero_of(bits: int) -> int:
    """Returns the code of zero where codes of 4, 5 or 6 bits have no minimum."""
    return 1 << (bits - 1)


def code_levels(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes of 4, 5 or 6 bits.

    Args:
      codes: uint8 [..., 32], from 0 to 2 ** bits - 1.

    Returns:
      uint8 [..., 4 * bits]. Byte i < 16 has the four lowest bits of code i in its low half and of code i + 16 in its
      high one. Bits above them follow, 1 or 2 of each code: byte 16 + b, starting at its lowest bits, has the bits of
      codes b, b + 4 and so on; with 2 bits, up to code b + 12, and byte 20 + b has the others.
    """
    low, more = codes[..., : BLOCK // 2] & 15 | codes[..., BLOCK // 2 :] << 4, bits - 4
    if not more:
        return low
    high = (codes >> 4).reshape(*codes.shape[:-1], more, 8 // more, WORD_BYTES) << _shifts(more)
    return np.concatenate([low, np.bitwise_or.reduce(high, axis=-2).reshape(*low.shape[:-1], -1)], axis=-1)


def _shifts(more: int) -> np.ndarray:
    return np.arange(0, 8, more, dtype=np.uint8)[:, None]
