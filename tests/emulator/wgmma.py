"""Matrix products of warpgroups (wgmma): descriptors of operands in shared memory, fragments of operands in registers.

Each warp multiplies its 16 of the 64 rows, in float32.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from tests.emulator.memory import GRANULE, Trap, swizzled

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}


@functools.lru_cache(maxsize=4096)
def addresses(descriptor: int, rows: int, depth: int, transposed: bool, size: int) -> np.ndarray:
    """Addresses in shared memory [rows, depth] of the elements of an operand, swizzled.

    A descriptor holds, in units of 16 bytes, where the operand starts (bits 0 to 13) and two strides between atoms of
    8 rows (16 to 29 leading, 32 to 45 stride), and the kind of swizzle (62 to 63).

    Args:
      rows: of A, or columns of B.
      transposed: rows, not depth, lie next to each other (MN-major).
      size: bytes of an element.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    span = _SPANS[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise Trap(f"wgmma descriptor {descriptor:#x}: an operand that does not start with a row 0 of the swizzle")
    if start >= 1 << 18:
        raise Trap(f"wgmma descriptor {descriptor:#x}: the operand starts at {start}")
    row, column = np.arange(rows, dtype=np.int64)[:, None], np.arange(depth, dtype=np.int64)[None, :]
    if transposed:
        if size != 2:
            raise Trap("wgmma: operands of 8 bits cannot be transposed")
        row, column = column, row  # contiguous numbers are called a column from here on
    width = (span or 16) // size  # elements of a row of an atom of 8 rows
    if span == 0:  # atoms of 8 rows of 16 bytes
        if transposed:
            raise NotImplementedError("wgmma: a transposed operand without a swizzle")
        return start + row // 8 * stride + column // width * leading + row % 8 * 16 + column % width * size
    offset = row // 8 * stride + row % 8 * span + column % width * size + column // width * leading
    if not transposed and (start % span + depth * size) > span:
        raise Trap(f"wgmma descriptor {descriptor:#x}: {depth * size} bytes of a row beyond a swizzle of {span}")
    return swizzled(start + offset, span)


@functools.lru_cache(maxsize=4096)
def granules(descriptor: int, rows: int, depth: int, transposed: bool, size: int) -> np.ndarray:
    return np.unique(addresses(descriptor, rows, depth, transposed, size) // GRANULE)


def load(data: np.ndarray, where: np.ndarray, dtype) -> np.ndarray:
    """Elements of shared memory at addresses, in float32."""
    size = np.dtype(dtype).itemsize
    return data.view(UNSIGNED[size])[where // size].view(dtype).astype(np.float32)


UNSIGNED = {1: np.uint8, 2: np.uint16}
_LANE = np.arange(32)


def from_fragments(registers: list[np.ndarray], dtype) -> np.ndarray:
    """The 16 rows of A that a warp has in four registers, each with two (or four) elements of a row."""
    per = 4 // np.dtype(dtype).itemsize
    matrix = np.zeros((16, 8 * per), np.float32)
    for i, register in enumerate(registers):
        pair = register.view(dtype).reshape(32, per).astype(np.float32)
        row, column = _LANE // 4 + 8 * (i % 2), per * (_LANE % 4) + 4 * per * (i // 2)
        for j in range(per):
            matrix[row, column + j] = pair[:, j]
    return matrix


def to_accumulators(matrix: np.ndarray) -> list[np.ndarray]:
    """Registers, as bits, of a warp's 16 rows of a result [16, n]."""
    n = matrix.shape[1]
    parts = matrix.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)
    return list(np.ascontiguousarray(parts, np.float32).view(np.uint32))


def from_accumulators(registers: list[np.ndarray]) -> np.ndarray:
    """A warp's 16 rows of a result, [16, n] float32, of its registers."""
    n = 2 * len(registers)
    parts = np.stack(registers).view(np.float32).reshape(n // 8, 2, 2, 8, 4)
    return np.ascontiguousarray(parts.transpose(1, 3, 0, 4, 2).reshape(16, n))


@dataclasses.dataclass
class Product:
    """A wgmma from its issue until it is waited for.

    Args:
      result: names of the registers that it adds to.
      a: the 16 rows of A, or addresses of them. b: addresses of B, [n, depth].
      keep: True if it adds to the present values.
      touched: its registers, as bits; see `Compiler.products_mask`.
    """

    result: tuple
    a: np.ndarray
    a_in_memory: bool
    b: np.ndarray
    dtype: type
    keep: bool
    signs: tuple[int, int]
    reads: list[np.ndarray]
    touched: int

    def run(self, data: np.ndarray, accumulators: np.ndarray) -> np.ndarray:
        a = load(data, self.a, self.dtype) if self.a_in_memory else self.a
        b = load(data, self.b, self.dtype)
        product = (a * self.signs[0]) @ (b * self.signs[1]).T
        return accumulators + product if self.keep else product
