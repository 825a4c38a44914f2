"""Rounds values to blocks of GGUF types, with NumPy: the inverse of `gguf_blocks.decode`. Knows no files.

Scales and minima are the reference quantiser's (ggml, ggml-quants.c); codes are the nearest for a scale as it is
stored.
"""

from __future__ import annotations

import numpy as np

from ksana_jax.loading.gguf_blocks import FLOATS
from ksana_jax.native.shapes import BLOCK

# Types that values can be rounded to -> bits of a code, and whether blocks have a minimum.
QUANTISED = {"Q4_0": (4, False), "Q4_1": (4, True), "Q5_0": (5, False), "Q5_1": (5, True), "Q8_0": (8, False)}


def encode(kind: str, values: np.ndarray) -> np.ndarray:
    """Returns the blocks of values.

    Args:
      kind: a type of `QUANTISED` or `gguf_blocks.FLOATS`.
      values: [..., columns], finite; columns are a multiple of 32, unless kind is one of `FLOATS`.

    Returns:
      uint8 [..., bytes].

    Raises:
      ValueError: scales are beyond the range of float16.
    """
    if kind in FLOATS:
        return np.ascontiguousarray(values, FLOATS[kind]).view(np.uint8)
    bits, has_minima = QUANTISED[kind]
    x = values.astype(np.float32).reshape(-1, BLOCK)
    halves = []
    if has_minima:
        low = x.min(-1, keepdims=True)
        halves = [(x.max(-1, keepdims=True) - low) / (2**bits - 1), low]
    elif bits == 8:
        halves = [np.abs(x).max(-1, keepdims=True) / 127]
    else:  # of codes with a sign, the lowest has the largest magnitude
        largest = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
        halves = [largest / -(2 ** (bits - 1))]
    with np.errstate(over="ignore"):
        halves = [half.astype("<f2") for half in halves]
    if not all(np.isfinite(half).all() for half in halves):
        raise ValueError(f"values of up to {np.abs(x).max():.3g} exceed the float16 scales of {kind}")
    scale, minimum = (half.astype(np.float32) for half in (*halves, np.zeros_like(halves[0]))[:2])
    least = 0 if has_minima else -(2 ** (bits - 1))
    codes = np.rint(np.divide(x - minimum, scale, out=np.zeros_like(x), where=scale != 0))
    codes = codes.clip(least, least + 2**bits - 1).astype(np.int16)
    parts = [half.view(np.uint8) for half in halves]
    if bits == 8:
        parts.append(codes.astype(np.int8).view(np.uint8))
    else:
        codes = (codes - least).astype(np.uint8)
        if bits == 5:
            parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
        parts.append(codes[:, : BLOCK // 2] & 15 | (codes[:, BLOCK // 2 :] & 15) << 4)
    return np.concatenate(parts, axis=-1).reshape(*values.shape[:-1], -1)
