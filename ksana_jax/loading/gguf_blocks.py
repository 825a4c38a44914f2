"""Decodes the blocks of GGUF tensors, or takes them apart, with NumPy. Knows no files, no names of weights.

A block stores neighbouring values of a row as small integers with float16 scales. Letters: d, m are float16 scale and
minimum, q packed integers, h their highest bits, s packed 6-bit (or smaller) scales of a superblock's sub-blocks.
Source: ggml (ggml-common.h and ggml-quants.c). Values equal the package `gguf` bit for bit: scales of sub-blocks times
d, and these products times codes, are exact in float32. MXFP4 is from the Open Compute Project, Microscaling Formats
1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from ksana_jax.core.gguf_file import TYPES
from ksana_jax.models.block_matrix import FORMS, ZERO
from ksana_jax.native.shapes import BLOCK

# Codes [blocks, values] of 8 bits; scales [blocks, groups] of groups of codes, float16 as stored, or float32;
# and minima in the same form, if any.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]

_BLOCK_BYTES = {kind.name: kind.num_bytes for kind in TYPES.values()}
# Types without blocks, whose values are stored as they are.
FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Levels of IQ4_NL; and of MXFP4, twice the levels of E2M1, where gguf has no negative zero.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def decode(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Returns the values of blocks.

    Args:
      kind: a type of `gguf_file.TYPES`, such as "Q4_1".
      blocks: uint8 [..., bytes], whole blocks.

    Returns:
      [..., values] in float32, or in the stored dtype of `FLOATS`.
    """
    if kind in FLOATS:
        return np.ascontiguousarray(blocks).view(FLOATS[kind])
    with np.errstate(over="ignore", invalid="ignore"):  # scales that are not finite; loading names the tensor
        codes, scales, minima = _PARTS[kind](blocks.reshape(-1, _BLOCK_BYTES[kind]))
        values = scales[..., None].astype(np.float32) * codes.reshape(*scales.shape, -1)
        if minima is not None:
            values += minima[..., None].astype(np.float32)
    return values.reshape(*blocks.shape[:-1], -1)


def apart(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Takes blocks apart without decoding them.

    Args:
      kind: a type of `models.block_matrix.FORMS`. blocks: uint8 [rows, bytes], whole blocks.

    Returns:
      Codes, scales and, if any, minima, as in `BlockMatrix`.
    """
    rows = len(blocks)
    with np.errstate(over="ignore", invalid="ignore"):
        codes, scales, minima = _PARTS[kind](blocks.reshape(-1, _BLOCK_BYTES[kind]))
    codes = np.ascontiguousarray(codes.reshape(rows, -1, BLOCK)).view(np.int8)
    if FORMS[kind].bits == 4:
        codes = (codes + np.int8(ZERO if minima is None else 0)).view(np.uint8)
        codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return codes, scales.reshape(rows, -1), None if minima is None else minima.reshape(rows, -1)


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns [blocks, 1], the float16 at a byte of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _f32(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the same in float32."""
    return _f16(blocks, at).astype(np.float32)


def _less(codes: np.ndarray, zero: int) -> np.ndarray:
    """Returns codes [...], uint8, with a number subtracted, in int8."""
    return (codes - np.uint8(zero)).view(np.int8)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 2 n] from bytes [blocks, n]: all low halves, then all high halves."""
    return np.concatenate([q & 15, q >> 4], axis=-1)


def _five_bits(h: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 32] numbers; bit j of the 32 bits in h is the highest bit of number j."""
    return _nibbles(q) | np.unpackbits(h, axis=-1, bitorder="little") << 4


def _q4_0(b: np.ndarray) -> _Parts:
    return _less(_nibbles(b[:, 2:]), 8), _f16(b, 0), None


def _q4_1(b: np.ndarray) -> _Parts:
    return _nibbles(b[:, 4:]), _f16(b, 0), _f16(b, 2)


def _q5_0(b: np.ndarray) -> _Parts:
    return _less(_five_bits(b[:, 2:6], b[:, 6:]), 16), _f16(b, 0), None


def _q5_1(b: np.ndarray) -> _Parts:
    return _five_bits(b[:, 4:8], b[:, 8:]), _f16(b, 0), _f16(b, 2)


def _q8_0(b: np.ndarray) -> _Parts:
    return b[:, 2:].view(np.int8), _f16(b, 0), None


def _iq4_nl(b: np.ndarray) -> _Parts:
    return IQ4_LEVELS[_nibbles(b[:, 2:])], _f16(b, 0), None


def _mxfp4(b: np.ndarray) -> _Parts:
    # Half of 2 ** (exponent - 127), in the bits of a float32; the two smallest are subnormal.
    exponent = b[:, :1].astype(np.uint32)
    half = np.where(exponent < 2, np.uint32(0x0020_0000) << exponent, (exponent - 1) << 23).view(np.float32)
    return MXFP4_LEVELS[_nibbles(b[:, 1:])], half, None


def _six_bits(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and the minima [blocks, 8] of 8 sub-blocks from 12 bytes."""
    a, b, c = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    minima = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return scales, minima


def _nibble_runs(q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 8, 32] from 128 bytes: a run of 32 bytes has the low halves of one sub-block, then the high."""
    return _nibbles(q.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(b: np.ndarray) -> _Parts:
    scales, minima = _six_bits(b[:, 4:16])
    return _nibble_runs(b[:, 16:]), _f32(b, 0) * scales, -(_f32(b, 2) * minima)


def _q5_k(b: np.ndarray) -> _Parts:
    scales, minima = _six_bits(b[:, 4:16])
    # Bit i of byte j is the highest bit of number j of sub-block i.
    highest = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _nibble_runs(b[:, 48:]) | highest << 4, _f32(b, 0) * scales, -(_f32(b, 2) * minima)


def _two_bits(q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 16, 16] from 64 bytes: 32 bytes have 4 runs of 32 numbers, one at each pair of bits."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (q.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)


def _q6_k(b: np.ndarray) -> _Parts:
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    numbers = low.reshape(-1, 16, 16) | _two_bits(b[:, 128:192]) << 4
    return _less(numbers, 32), _f32(b, 208) * b[:, 192:208].view(np.int8), None


def _q2_k(b: np.ndarray) -> _Parts:
    s = b[:, :16]
    return _two_bits(b[:, 16:80]), _f32(b, 80) * (s & 15), -(_f32(b, 82) * (s >> 4))


def _q3_k(b: np.ndarray) -> _Parts:
    # Bit r of byte j belongs to number j of the r-th run of 32; where it is not set, the number is 4 less.
    highest = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    s = b[:, 96:108]
    top = (s[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = _less(_nibbles(s[:, :8]) | top << 4, 32)
    return _less(_two_bits(b[:, 32:96]) | highest << 2, 4), _f32(b, 108) * scales, None


_PARTS: dict[str, Callable[[np.ndarray], _Parts]] = {
    **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4},
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}
