"""Keys and values as codes of 2, 3 or 4 bits, with a scale and a zero for each group of channels of a vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.errors import ConfigError

# Channels that share a scale and a zero: with 4 bits, 0.5 bits more for each number.
GROUP = 64


@dataclasses.dataclass(frozen=True)
class Packed:
    """Stores the channels of a token and head in groups of 64, asymmetric: a number is about zero + code * scale.

    Zero and scale are those of the group's smallest and largest number, in float16. The error of a number is at most
    half a step, which is the group's range / (2^bits - 1), and 2^-10 of its largest magnitude and range. A head dim
    that 64 does not divide has smaller groups.

    Source: the quantisation of values in KIVI, arXiv:2402.02750, section 3; here for keys too, where that paper groups
    tokens instead of channels.
    """

    bits: int

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        if head_dim * self.bits % 8:
            raise ConfigError(f"head_dim is {head_dim}: its codes of {self.bits} bits do not fill whole bytes")
        groups = (head_dim // math.gcd(head_dim, GROUP),)
        return {
            "kv": ((head_dim * self.bits // 8,), "uint8"),
            "scale": (groups, "float16"),
            "zero": (groups, "float16"),
        }

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        h, most = x.shape[-1], 2**self.bits - 1
        x = x.astype(xp.float32).reshape(*x.shape[:-1], -1, math.gcd(h, GROUP))
        low, high = x.min(axis=-1), x.max(axis=-1)
        scale, zero = ((high - low) / most).astype(xp.float16), low.astype(xp.float16)
        # Codes are those of the rounded scale and zero, as they will be read.
        step, first = (a.astype(xp.float32)[..., None] for a in (scale, zero))
        codes = xp.round((x - first) / xp.where(step > 0, step, xp.float32(1)))
        codes = xp.clip(codes, 0, most).astype(xp.uint8).reshape(*x.shape[:-2], h)
        return {"kv": _packed(codes, self.bits, xp), "scale": scale, "zero": zero}

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        scale, zero = (stored[name].astype(xp.float32)[..., None] for name in ("scale", "zero"))
        codes = _unpacked(stored["kv"], self.bits, xp)
        x = codes.astype(xp.float32).reshape(*scale.shape[:-1], -1) * scale + zero
        return x.reshape(codes.shape)


def _packed(codes: Any, bits: int, xp: Any) -> Any:
    """Returns codes [..., H] as bytes [..., H * bits / 8], the lowest bit first."""
    ones = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    ones = ones.reshape(*codes.shape[:-1], -1, 8)
    return (ones << np.arange(8, dtype=np.uint8)).sum(axis=-1, dtype=xp.uint8)


def _unpacked(stored: Any, bits: int, xp: Any) -> Any:
    """Returns the codes [..., H] of bytes."""
    ones = (stored[..., None] >> np.arange(8, dtype=np.uint8)) & 1
    ones = ones.reshape(*stored.shape[:-1], -1, bits)
    return (ones << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=xp.uint8)
