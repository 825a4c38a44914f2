"""Decodes the blocks of GGUF tensors, or takes them apart, with NumPy. Knows no files, no names of weights.

A block stores neighbouring values of a row as small integers with float16 scales. Letters: d, m are float16 scale and
minimum, q packed integers, h their highest bits, s packed 6-bit (or smaller) scales of a superblock's sub-blocks.
Source: ggml (ggml-common.h and ggml-quants.c). Values equal the package `gguf` bit for bit: scales of sub-blocks times
d, and these products times codes, are exact in float32. MXFP4 is from the Open Compute Project, Microscaling Formats
1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ksana_jax.core.gguf_file import TYPES
from ksana_jax.models.block_matrix import FORMS, code_levels, zero_of
from ksana_jax.native.shapes import BLOCK


class Parts(NamedTuple):
    """Blocks taken apart: code * scale, or code * scale + minimum. With factors, scales and minima are integers to be
    multiplied by the first and the second factor of their superblock of 256.

    codes: [blocks, values], int8, or uint8 from 0.
    scales: [blocks, groups], float16 as stored, float32, or int8. minima: as scales.
    factors: float16 [blocks, 1, or 2 with minima].
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None
    factors: np.ndarray | None = None


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
        codes, scales, minima, factors = _PARTS[kind](blocks.reshape(-1, _BLOCK_BYTES[kind]))
        scales = scales.astype(np.float32)
        if factors is not None:
            scales *= factors[:, :1].astype(np.float32)
        values = scales[..., None] * codes.reshape(*scales.shape, -1)
        if minima is not None:
            minima = minima.astype(np.float32)
            if factors is not None:
                minima *= factors[:, 1:].astype(np.float32)
            values += minima[..., None]
    return values.reshape(*blocks.shape[:-1], -1)


def apart(kind: str, blocks: np.ndarray) -> Parts:
    """Takes blocks apart without decoding them.

    Args:
      kind: a type of `models.block_matrix.FORMS`. blocks: uint8 [rows, bytes], whole blocks.

    Returns:
      Codes, scales and, if any, minima and factors, as in `BlockMatrix`.
    """
    rows, form = len(blocks), FORMS[kind]
    with np.errstate(over="ignore", invalid="ignore"):
        codes, scales, minima, factors = _PARTS[kind](blocks.reshape(-1, _BLOCK_BYTES[kind]))
    codes = codes.reshape(rows, -1, BLOCK)
    if form.bits < 8:
        codes = code_levels(codes.view(np.uint8) + np.uint8(0 if form.has_minima else zero_of(form.bits)), form.bits)
    return Parts(
        codes if form.bits < 8 else codes.view(np.int8),
        scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
        None if factors is None else factors.reshape(rows, -1, factors.shape[1]),
    )


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns [blocks, 1], the float16 at a byte of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _with_minima(codes: np.ndarray, blocks: np.ndarray, at: int, scales: np.ndarray, minima: np.ndarray) -> Parts:
    """Returns the parts of superblocks whose float16 factors of scales and of subtracted minima are at a byte."""
    factors = np.concatenate([_f16(blocks, at), -_f16(blocks, at + 2)], axis=1)
    return Parts(codes, scales.view(np.int8), minima.view(np.int8), factors)


def _less(codes: np.ndarray, zero: int) -> np.ndarray:
    """Returns codes [...], uint8, with a number subtracted, in int8."""
    return (codes - np.uint8(zero)).view(np.int8)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 2 n] from bytes [blocks, n]: all low halves, then all high halves."""
    return np.concatenate([q & 15, q >> 4], axis=-1)


def _five_bits(h: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 32] numbers; bit j of the 32 bits in h is the highest bit of number j."""
    return _nibbles(q) | np.unpackbits(h, axis=-1, bitorder="little") << 4


def _q4_0(b: np.ndarray) -> Parts:
    return Parts(_less(_nibbles(b[:, 2:]), 8), _f16(b, 0))


def _q4_1(b: np.ndarray) -> Parts:
    return Parts(_nibbles(b[:, 4:]), _f16(b, 0), _f16(b, 2))


def _q5_0(b: np.ndarray) -> Parts:
    return Parts(_less(_five_bits(b[:, 2:6], b[:, 6:]), 16), _f16(b, 0))


def _q5_1(b: np.ndarray) -> Parts:
    return Parts(_five_bits(b[:, 4:8], b[:, 8:]), _f16(b, 0), _f16(b, 2))


def _q8_0(b: np.ndarray) -> Parts:
    return Parts(b[:, 2:].view(np.int8), _f16(b, 0))


def _iq4_nl(b: np.ndarray) -> Parts:
    return Parts(IQ4_LEVELS[_nibbles(b[:, 2:])], _f16(b, 0))


def _mxfp4(b: np.ndarray) -> Parts:
    # Half of 2 ** (exponent - 127), in the bits of a float32; the two smallest are subnormal.
    exponent = b[:, :1].astype(np.uint32)
    half = np.where(exponent < 2, np.uint32(0x0020_0000) << exponent, (exponent - 1) << 23).view(np.float32)
    return Parts(MXFP4_LEVELS[_nibbles(b[:, 1:])], half)


def _six_bits(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and the minima [blocks, 8] of 8 sub-blocks from 12 bytes."""
    a, b, c = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    minima = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return scales, minima


def _nibble_runs(q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 8, 32] from 128 bytes: a run of 32 bytes has the low halves of one sub-block, then the high."""
    return _nibbles(q.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(b: np.ndarray) -> Parts:
    scales, minima = _six_bits(b[:, 4:16])
    return _with_minima(_nibble_runs(b[:, 16:]), b, 0, scales, minima)


def _q5_k(b: np.ndarray) -> Parts:
    scales, minima = _six_bits(b[:, 4:16])
    # Bit i of byte j is the highest bit of number j of sub-block i.
    highest = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _with_minima(_nibble_runs(b[:, 48:]) | highest << 4, b, 0, scales, minima)


def _two_bits(q: np.ndarray) -> np.ndarray:
    """Returns [blocks, 16, 16] from 64 bytes: 32 bytes have 4 runs of 32 numbers, one at each pair of bits."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (q.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)


def _q6_k(b: np.ndarray) -> Parts:
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    numbers = low.reshape(-1, 16, 16) | _two_bits(b[:, 128:192]) << 4
    return Parts(_less(numbers, 32), b[:, 192:208].view(np.int8), None, _f16(b, 208))


def _q2_k(b: np.ndarray) -> Parts:
    s = b[:, :16]
    return _with_minima(_two_bits(b[:, 16:80]), b, 80, s & 15, s >> 4)


def _q3_k(b: np.ndarray) -> Parts:
    # Bit r of byte j belongs to number j of the r-th run of 32; where it is not set, the number is 4 less.
    highest = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    s = b[:, 96:108]
    top = (s[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = _less(_nibbles(s[:, :8]) | top << 4, 32)
    return Parts(_less(_two_bits(b[:, 32:96]) | highest << 2, 4), scales, None, _f16(b, 108))


_PARTS: dict[str, Callable[[np.ndarray], Parts]] = {
    **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4},
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}
