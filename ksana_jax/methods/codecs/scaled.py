"""Keys and values as codes of 8 bits, with one scale for each vector."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ksana_jax.kv.codecs.base import numbers

# Vectors whose largest magnitude is smaller become zeros: a largest code / magnitude could overflow.
SMALLEST = 1e-30


@dataclasses.dataclass(frozen=True)
class ScaledCodec:
    """Stores a vector as codes times one float32 scale, from its largest magnitude; symmetric, no zero point.

    The error of a number is at most half a step. In int8 a step is the largest magnitude of the vector / 127. In
    float8_e4m3fn it is 2^-3 of the number's power of two, and at least 2^-9 / 448 of the largest magnitude.

    Args:
      dtype: NumPy's name of the codes' type.
      largest: the largest code.
    """

    dtype: str
    largest: float

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"kv": ((head_dim,), self.dtype), "scale": ((), "float32")}

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        x = x.astype(xp.float32)
        top = xp.max(xp.abs(x), axis=-1)
        # The formulas of the kernels that write, see `pallas_kernels.kv_write_reference.quantised`.
        factor = xp.where(top < SMALLEST, xp.float32(0), self.largest / xp.where(top < SMALLEST, xp.float32(1), top))
        codes = x * factor[..., None]
        codes = xp.round(codes) if self.dtype == "int8" else codes
        return {"kv": codes.astype(self.dtype), "scale": top * xp.float32(1 / self.largest)}

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        return numbers(stored["kv"], self.dtype, xp).astype(xp.float32) * stored["scale"][..., None]


int8 = functools.partial(ScaledCodec, "int8", 127.0)
fp8_e4m3 = functools.partial(ScaledCodec, "float8_e4m3fn", 448.0)
