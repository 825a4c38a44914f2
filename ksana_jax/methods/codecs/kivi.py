"""KIVI: keys quantised per channel, values per token."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.base import BlockCodec
from ksana_jax.methods.codecs.packed import dequantised, packed, packed_bytes, quantised, unpacked


@dataclasses.dataclass(frozen=True)
class Kivi(BlockCodec):
    """Stores keys in groups of tokens of one channel, and values in groups of channels of one token.

    Channels of keys have outliers that a group of channels would share; channels of values do not. A number is about
    zero + code * scale, with the float16 scale and zero of its group's smallest and largest number. The error is at
    most half a step, plus 2^-10 of the group's largest magnitude and range. A step is the range / (2^bits - 1).

    Args:
      bits: of a code.
      group: numbers that share a scale and a zero, 32 bits in all; fewer where a block has fewer tokens, or where they
        do not divide its tokens (keys) or the head dim (values). 4 bits and 64 numbers take 4.5 bits for each number.

    Source: arXiv:2402.02750, section 3, where groups have 32 numbers.
    """

    bits: int = 2
    group: int = 64

    def __post_init__(self):
        checks.require(
            checks.integer("kv_cache_dtype bits", self.bits, 1, 8),
            checks.integer("kv_cache_dtype group", self.group),
            error=ConfigError,
        )

    def arrays(self, block_size: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        if self.side == "k":
            groups = (block_size // math.gcd(block_size, self.group), head_dim)
        else:
            groups = (block_size, head_dim // math.gcd(head_dim, self.group))
        codes = (block_size, packed_bytes(head_dim, self.bits))
        return {"codes": (codes, "uint8"), "scale": (groups, "float16"), "zero": (groups, "float16")}

    @property
    def _levels(self) -> np.ndarray | None:
        """Numbers of the codes, [2^bits] in units of a group's scale; None for 0, 1, 2, ..."""
        return None

    @property
    def _axis(self) -> int:
        """Axis of a group's numbers, along which its scale and zero broadcast, in blocks split into groups."""
        return -2 if self.side == "k" else -1

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        *others, size, h = x.shape
        if self.side == "k":
            groups = x.reshape(*others, -1, math.gcd(size, self.group), h)
        else:
            groups = x.reshape(*others, size, -1, math.gcd(h, self.group))
        codes, scale, zero = quantised(groups, self.bits, self._axis, xp, self._levels)
        scale, zero = (a.squeeze(self._axis) for a in (scale, zero))
        return {"codes": packed(codes.reshape(x.shape), self.bits, xp), "scale": scale, "zero": zero}

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        codes = unpacked(stored["codes"], self.bits, xp)
        scale, zero = (xp.expand_dims(stored[name], self._axis) for name in ("scale", "zero"))
        *others, size, h = codes.shape
        split = (scale.shape[-3], -1, h) if self.side == "k" else (size, scale.shape[-2], -1)
        return dequantised(codes.reshape(*others, *split), scale, zero, xp, self._levels).reshape(codes.shape)


kivi4, kivi3, kivi2 = (functools.partial(Kivi, bits=bits) for bits in (4, 3, 2))
