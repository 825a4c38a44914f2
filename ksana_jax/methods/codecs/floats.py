"""Keys and values as floats without a scale."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ksana_jax.kv.codecs.base import numbers

# IEEE's conversion to float8_e5m2 turns larger numbers into infinity.
LARGEST_E5M2 = 57_344.0


@dataclasses.dataclass(frozen=True)
class Float:
    """Rounds each number to a float type.

    The relative error is at most 2^-9 in bfloat16, 2^-12 in float16 and 2^-3 in float8_e5m2 (above its smallest normal
    number, 2^-14), where numbers beyond the largest one, 57,344, become that one.
    """

    dtype: str

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"kv": ((head_dim,), self.dtype)}

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        if self.dtype == "float8_e5m2":
            x = xp.clip(x, -LARGEST_E5M2, LARGEST_E5M2)
        return {"kv": x.astype(self.dtype)}

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        return numbers(stored["kv"], self.dtype, xp)


f32 = functools.partial(Float, "float32")
bf16 = functools.partial(Float, "bfloat16")
f16 = functools.partial(Float, "float16")
fp8_e5m2 = functools.partial(Float, "float8_e5m2")
