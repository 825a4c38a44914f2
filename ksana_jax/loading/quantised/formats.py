"""Formats of quantised matrices [out, in], each stored as several tensors. Knows no configs and no names of weights.

A number is (code - zero) * scale. Blocks of rows and columns share a scale and a zero; without zeros, codes are
symmetric. Codes and zeros have a sign here: unsigned ones are stored with 2 ** (bits - 1) added.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from ksana_jax.core.errors import LoadError
from ksana_jax.loading.gguf_blocks import MXFP4_LEVELS
from ksana_jax.loading.stored_tensor import StoredTensor
from ksana_jax.native.shapes import BLOCK

METHODS = ("GPTQ", "AWQ", "compressed-tensors", "FP8", "MXFP4")
FLOAT_SCALES = ("F16", "BF16", "F32")
_WORD_BITS = 32
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word has its columns
Parts = Mapping[str, StoredTensor]


class TensorSpec(NamedTuple):
    """A tensor of a matrix, with the shape and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    required: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(abc.ABC):
    """A way to store a matrix.

    Args:
      method: name in `METHODS`.
      bits: of a code. has_zeros: False if codes are symmetric.
      rows, columns: of a block that shares a scale; None for all.
      stored: dtype of the codes; "I32" for words of several.
      scale: name of the tensor of scales.
      group_of_column: name of a tensor [in] with the group of each column.
      sorts: True if groups are columns in any order, so that this tensor must be present.
    """

    method: str
    bits: int
    has_zeros: bool
    rows: int | None
    columns: int | None
    stored: str = "I32"
    scale: str
    group_of_column: ClassVar[str]
    sorts: bool = False

    def __str__(self) -> str:
        shared = f"{self.rows or 'all'} x {self.columns or 'all'} share" if self.rows != 1 else "each row has"
        if self.rows == 1 and self.columns:
            shared = f"groups of {self.columns} share"
        return f"{self.method}, {self.bits} bits, {shared} a scale{' and a zero' * self.has_zeros}"

    @property
    def is_float(self) -> bool:
        """True if codes are floats of 8 bits."""
        return self.stored == "F8_E4M3"

    def stem(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Returns what names of the parts begin with, for a tensor that the format may store, else None."""
        return name.removesuffix("weight") if len(shape) == 2 and name.endswith(".weight") else None

    @abc.abstractmethod
    def parts(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Returns the tensors of a matrix [out, in] by the last component of their names."""

    @abc.abstractmethod
    def codes(self, parts: Parts, rows: slice, columns: slice) -> np.ndarray:
        """Returns codes [rows, columns], with a sign; of integers in int8."""

    @abc.abstractmethod
    def scales(self, parts: Parts, rows: slice) -> np.ndarray:
        """Returns the scales [rows, groups] in float32."""

    @abc.abstractmethod
    def zeros(self, parts: Parts, rows: slice) -> np.ndarray | None:
        """Returns the zeros [rows, groups] in int8, or None."""

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns how many blocks the rows and the columns of a matrix are divided into."""
        return -(-shape[0] // (self.rows or shape[0])), -(-shape[1] // (self.columns or shape[1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFirst(Format):
    """GPTQ and AWQ: tensors are [in, out], and words of 32 bits have zeros of neighbouring columns of these.

    Args:
      along_in: True if a word has codes of one column (GPTQ), False if of one row, in an order of its own (AWQ).
      one_less: True if zeros are stored less 1 (GPTQ version 1).

    Source: AutoGPTQ and GPTQModel (torch kernels); AutoAWQ (gemm).
    """

    along_in: bool
    one_less: bool = False
    scale: str = "scales"
    group_of_column = "g_idx"

    def parts(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        (num_out, num_in), (_, groups) = shape, self.blocks(shape)
        per_word, words = _WORD_BITS // self.bits, ("I32",)
        in_words, out_words = -(-num_in // per_word), -(-num_out // per_word)
        found = {
            "qweight": TensorSpec((in_words, num_out) if self.along_in else (num_in, out_words), words),
            "qzeros": TensorSpec((groups, out_words), words),
            self.scale: TensorSpec((groups, num_out), FLOAT_SCALES),
        }
        of_columns = {self.group_of_column: TensorSpec((num_in,), words, required=self.sorts)}
        return found | (of_columns if self.along_in else {})

    def codes(self, parts: Parts, rows: slice, columns: slice) -> np.ndarray:
        if self.along_in:
            words, inside = _words(columns, self.bits)
            return unpacked(parts["qweight"].read(words, rows).T, self.bits)[:, inside]
        return self._of_rows(parts["qweight"], columns, rows)

    def scales(self, parts: Parts, rows: slice) -> np.ndarray:
        return parts[self.scale].read(slice(None), rows).T.astype(np.float32)

    def zeros(self, parts: Parts, rows: slice) -> np.ndarray | None:
        # GPTQModel adds 1 to all zeros of a word by a single addition, whose carries undo the borrows of storing them.
        ones = (1 << _WORD_BITS) // ((1 << self.bits) - 1) if self.one_less else 0
        found = self._of_rows(parts["qzeros"], slice(None), rows, ones)
        if self.has_zeros:
            return found
        if found.any():
            stored, zero = parts["qzeros"], 1 << self.bits - 1
            said = f"has zeros other than {zero}, but sym is true"
            if self.one_less and (found == 1).all():
                said = f"stores each zero as {zero}, not less 1: set checkpoint_format to gptq_v2 in config.json"
            raise LoadError(f"{stored.path}: {stored.name} {said}")
        return None

    def _of_rows(self, stored: StoredTensor, of_in: slice, rows: slice, added: int = 0) -> np.ndarray:
        """Returns numbers [rows, of_in] from words [of_in, rows / per word], to which a number is added."""
        words, inside = _words(rows, self.bits)
        found = unpacked(stored.read(of_in, words).view(np.uint32) + np.uint32(added), self.bits)
        if not self.along_in:
            found = found.reshape(len(found), -1, len(_AWQ_ORDER))[..., _AWQ_ORDER].reshape(found.shape)
        return found[:, inside].T


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutFirst(Format):
    """compressed-tensors and FP8 in blocks: tensors are [out, in]; words of 32 bits have codes of neighbouring columns,
    and zeros of neighbouring rows.

    Source: compressed-tensors (compressors); for FP8, transformers (finegrained_fp8).
    """

    scale: str = "weight_scale"
    group_of_column = "weight_g_idx"

    def parts(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        per_word, blocks = _WORD_BITS // self.bits, self.blocks(shape)
        found = {self.scale: TensorSpec(blocks if self.rows or self.columns else (1,), FLOAT_SCALES)}
        if self.stored != "I32":
            found["weight"] = TensorSpec(shape, (self.stored,))
            return found | (
                {"weight_zero_point": TensorSpec(found[self.scale].shape, ("I8",))} if self.has_zeros else {}
            )
        found["weight_packed"] = TensorSpec((shape[0], -(-shape[1] // per_word)), ("I32",))
        found["weight_shape"] = TensorSpec((2,), ("I64",))  # which the config gives too
        found[self.group_of_column] = TensorSpec(shape[1:], ("I32",), required=self.sorts)
        zeros = TensorSpec((-(-shape[0] // per_word), blocks[1]), ("I32",))
        return found | ({"weight_zero_point": zeros} if self.has_zeros else {})

    def codes(self, parts: Parts, rows: slice, columns: slice) -> np.ndarray:
        if self.stored != "I32":
            return parts["weight"].read(rows, columns)
        words, inside = _words(columns, self.bits)
        return unpacked(parts["weight_packed"].read(rows, words), self.bits)[:, inside]

    def scales(self, parts: Parts, rows: slice) -> np.ndarray:
        return self._of_blocks(parts[self.scale], rows).astype(np.float32)

    def zeros(self, parts: Parts, rows: slice) -> np.ndarray | None:
        if not self.has_zeros:
            return None
        stored = parts["weight_zero_point"]
        if self.stored != "I32":
            return self._of_blocks(stored, rows)
        words, inside = _words(rows, self.bits)
        return unpacked(stored.read(words, slice(None)).T, self.bits)[:, inside].T

    def _of_blocks(self, stored: StoredTensor, rows: slice) -> np.ndarray:
        """Returns what blocks share for each row, [rows, groups]."""
        blocks = np.arange(rows.start, rows.stop) // (self.rows or rows.stop)
        found = stored.read(slice(int(blocks[0]), int(blocks[-1]) + 1), slice(None))
        return found.reshape(len(found), -1)[blocks - blocks[0]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(Format):
    """MXFP4: stacks of matrices with the names of [E, in, out], whose blocks are [E, out, in / 32, 16]: two
    numbers of E2M1 a byte, the low half first, with an exponent of 2 for each 32. Codes are twice the numbers.

    Source: transformers (integrations/mxfp4.py); Open Compute Project, Microscaling Formats 1.0, section 5.
    """

    method: str = "MXFP4"
    bits: int = 8
    has_zeros: bool = False
    rows: int | None = 1
    columns: int | None = BLOCK
    stored: str = "I8"
    scale: str = "scales"
    group_of_column = ""

    def stem(self, name: str, shape: tuple[int, ...]) -> str | None:
        return f"{name}_" if len(shape) == 3 else None

    def parts(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        count, num_in, num_out = shape
        blocks = count, num_out, -(-num_in // BLOCK)
        return {"blocks": TensorSpec((*blocks, BLOCK // 2), ("U8",)), self.scale: TensorSpec(blocks, ("U8",))}

    def codes(self, parts: Parts, rows: slice, columns: slice) -> np.ndarray:
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        pairs = parts["blocks"].read(rows, blocks)
        found = MXFP4_LEVELS[np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)]
        first = columns.start - blocks.start * BLOCK
        return found[:, first : first + columns.stop - columns.start]

    def scales(self, parts: Parts, rows: slice) -> np.ndarray:
        exponents = parts[self.scale].read(rows, slice(None))
        # Half of 2 ** (exponent - 127); 255 stands for NaN.
        return np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents.astype(np.int32) - 128))

    def zeros(self, parts: Parts, rows: slice) -> np.ndarray | None:
        return None


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the numbers of 4 or 8 bits, low ones first, in words [...] of 32 bits, less 2 ** (bits - 1), in int8."""
    found = np.ascontiguousarray(words).view(np.uint8)  # low bytes first
    if bits == 4:
        found = np.stack([found & 15, found >> 4], axis=-1).reshape(*found.shape[:-1], -1)
    return (found - np.uint8(1 << bits - 1)).view(np.int8)


def _words(numbers: slice, bits: int) -> tuple[slice, slice]:
    """Returns the words that numbers from start to stop are in, and their place among the numbers of these words."""
    per_word, start, stop = _WORD_BITS // bits, numbers.start, numbers.stop
    words = slice(start // per_word, -(-stop // per_word))
    return words, slice(start - words.start * per_word, stop - words.start * per_word)
