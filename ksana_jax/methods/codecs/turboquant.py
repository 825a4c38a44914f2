"""TurboQuant: the levels that are best for a normal distribution, which the numbers of a rotated vector have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.methods.codecs.hadamard import Hadamard
from ksana_jax.methods.codecs.packed import packed, packed_bytes, unpacked


@dataclasses.dataclass(frozen=True)
class LloydMax:
    """Stores the length of a rotated vector in float32, and its direction as codes of 2^bits levels.

    A number of a random direction in H dimensions is nearly normal with variance 1 / H; the levels minimise its mean
    square error (Lloyd-Max). They lose 36, 11.7, 3.5 and 0.95 % of the vector's squared length with 1 to 4
    bits. Nothing depends on data, and a vector needs no zero and no scale of groups.

    Source: arXiv:2504.19874, section 3.1 (for the mean square error, without the residual of section 3.2), with
    random signs and a Hadamard matrix as the rotation.
    """

    bits: int

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"kv": ((packed_bytes(head_dim, self.bits),), "uint8"), "scale": ((), "float32")}

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        scale = xp.sqrt((x * x).mean(axis=-1))
        unit = x / xp.where(scale > 0, scale, xp.float32(1))[..., None]
        levels = lloyd_max(self.bits)
        codes = (unit[..., None] > (levels[1:] + levels[:-1]) / 2).sum(axis=-1, dtype=xp.uint8)
        return {"kv": packed(codes, self.bits, xp), "scale": scale}

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        unit = xp.asarray(lloyd_max(self.bits))[unpacked(stored["kv"], self.bits, xp)]
        return unit * stored["scale"][..., None]


@functools.cache
def lloyd_max(bits: int) -> np.ndarray:
    """Returns the 2^bits levels, ascending, float32, of least mean square error for the standard normal distribution.

    Each level is the mean between its bounds, each bound half-way between two levels.
    """
    half = np.arange(0.5, 2 ** (bits - 1)) * 3 / 2 ** (bits - 1)  # positive ones; the others mirror them
    for _ in range(1000):
        bounds = np.concatenate([[0.0], (half[1:] + half[:-1]) / 2, [math.inf]])
        density = np.exp(-(bounds**2) / 2) / math.sqrt(2 * math.pi)
        above = np.array([math.erfc(bound / math.sqrt(2)) / 2 for bound in bounds])
        half = (density[:-1] - density[1:]) / (above[:-1] - above[1:])
    return np.concatenate([-half[::-1], half]).astype(np.float32)


turboquant4, turboquant3, turboquant2 = (functools.partial(Hadamard, LloydMax(bits)) for bits in (4, 3, 2))
