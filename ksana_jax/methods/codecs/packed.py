"""Keys and values as codes of 2, 3 or 4 bits, with a scale and a zero for each group of channels of a vector."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.core.errors import ConfigError

# Channels that share a scale and a zero: with 4 bits, 0.5 bits more for each number.
GROUP = 64


@dataclasses.dataclass(frozen=True)
class Packed:
    """Stores the channels of a token and head in groups of 64, asymmetric: a number is about zero + code * scale.

    Zero and scale follow from the group's smallest and largest number, in float16. The error of a number is at most
    half a step, plus 2^-10 of the group's largest magnitude and range. A step is the range / (2^bits - 1). A head dim
    that 64 does not divide has smaller groups.

    Source: the quantisation of values in KIVI, arXiv:2402.02750, section 3; here for keys too, where that paper groups
    tokens instead of channels.
    """

    bits: int

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        groups = (head_dim // math.gcd(head_dim, GROUP),)
        return {
            "kv": ((packed_bytes(head_dim, self.bits),), "uint8"),
            "scale": (groups, "float16"),
            "zero": (groups, "float16"),
        }

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        groups = x.reshape(*x.shape[:-1], -1, math.gcd(x.shape[-1], GROUP))
        codes, scale, zero = quantised(groups, self.bits, -1, xp)
        return {"kv": packed(codes.reshape(x.shape), self.bits, xp), "scale": scale[..., 0], "zero": zero[..., 0]}

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        scale, zero = (stored[name][..., None] for name in ("scale", "zero"))
        codes = unpacked(stored["kv"], self.bits, xp)
        return dequantised(codes.reshape(*scale.shape[:-1], -1), scale, zero, xp).reshape(codes.shape)


def quantised(x: Any, bits: int, axis: int, xp: Any, levels: Any = None) -> tuple[Any, Any, Any]:
    """Returns codes of numbers, uint8 of x's shape, and float16 scales and zeros of the groups along an axis, which
    they keep with length 1.

    Args:
      levels: numbers [2^bits] of the codes, ascending, in units of a group's scale; None for 0, 1, 2, ...
    """
    most = 2**bits - 1
    x = x.astype(xp.float32)
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    scale, zero = ((high - low) / most).astype(xp.float16), low.astype(xp.float16)
    # Codes use the rounded scale and zero, as they will be read.
    step, first = (a.astype(xp.float32) for a in (scale, zero))
    codes = (x - first) / xp.where(step > 0, step, xp.float32(1))
    if levels is not None:
        return (codes[..., None] > (levels[1:] + levels[:-1]) / 2).sum(axis=-1, dtype=xp.uint8), scale, zero
    codes = xp.round(codes)
    return xp.clip(codes, 0, most).astype(xp.uint8), scale, zero


def dequantised(codes: Any, scale: Any, zero: Any, xp: Any, levels: Any = None) -> Any:
    """Returns the numbers, in float32, of codes with scales and zeros that broadcast to them; levels as above."""
    scale, zero = (a.astype(xp.float32) for a in (scale, zero))
    return (codes.astype(xp.float32) if levels is None else xp.asarray(levels)[codes]) * scale + zero


def packed(codes: Any, bits: int, xp: Any) -> Any:
    """Returns codes [..., H] as bytes [..., H * bits / 8], the lowest bit first."""
    if 8 % bits == 0:
        whole = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
        return (whole << np.arange(0, 8, bits, dtype=np.uint8)).sum(axis=-1, dtype=xp.uint8)
    ones = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    ones = ones.reshape(*codes.shape[:-1], -1, 8)
    return (ones << np.arange(8, dtype=np.uint8)).sum(axis=-1, dtype=xp.uint8)


def unpacked(stored: Any, bits: int, xp: Any) -> Any:
    """Returns the codes [..., H] of bytes."""
    if 8 % bits == 0:  # bit by bit, decoding would take several times as long
        codes = (stored[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
        return codes.reshape(*stored.shape[:-1], -1)
    ones = (stored[..., None] >> np.arange(8, dtype=np.uint8)) & 1
    ones = ones.reshape(*stored.shape[:-1], -1, bits)
    return (ones << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=xp.uint8)


def packed_bytes(head_dim: int, bits: int) -> int:
    """Returns the bytes of a vector's codes.

    Raises:
      ConfigError: the codes do not fill whole bytes.
    """
    if head_dim * bits % 8:
        raise ConfigError(f"head_dim is {head_dim}: its codes of {bits} bits do not fill whole bytes")
    return head_dim * bits // 8


int4, int3, int2 = (functools.partial(Packed, bits) for bits in (4, 3, 2))
