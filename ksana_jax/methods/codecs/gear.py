"""GEAR and GEAR-L: KIVI's codes, a low-rank approximation of their error, and the outliers exactly."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.methods.codecs.kivi import Kivi

# Rounds of the power iteration.
NUM_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Gear(Kivi):
    """Stores a block X as codes Q, outliers S and factors L: X is about Q + L, and S at its entries.

    A vector of keys is the tokens of one channel, a vector of values the channels of one token. The largest and the
    smallest numbers of each vector are replaced by the vector's mean before it is quantised (as `Kivi` does it), and
    stored with their indices in 16 bits, and 8 bits for an index up to 255. L approximates the remaining error of
    the other numbers by a matrix of low rank, in float16, one for each block and head.

    Args:
      outliers: fraction of the numbers of each vector that are outliers, half of them at either end; at least one at
        each, so that 2 % of 64 numbers are two numbers. 0 stores none (GEAR-L).
      rank: of L; 0 stores none. A block of 64 tokens and a head of 64 numbers take 256 bytes for each.

    Source: arXiv:2403.05527, sections 3 and 4: 2 % of outliers, and rank 2 for the 64 newest tokens of a sequence,
    which compressed together as every block is here. L is computed by a power iteration (algorithm 2) from a fixed
    start.
    """

    outliers: float = 0.02
    rank: int = 2

    residual: ClassVar[int] = 64

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.number("kv_cache_dtype outliers", self.outliers, 0, below=1),
            checks.integer("kv_cache_dtype rank", self.rank, 0),
            error=ConfigError,
        )

    def _num_outliers(self, length: int) -> int:
        """Returns how many numbers of a vector are outliers on either side."""
        return min(max(round(length * self.outliers / 2), 1), length // 2) if self.outliers else 0

    def arrays(self, block_size: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        found = super().arrays(block_size, head_dim)
        vectors, length = (head_dim, block_size) if self.side == "k" else (block_size, head_dim)
        if count := self._num_outliers(length):
            found["index"] = (vectors, 2 * count), "uint8" if length <= 256 else "uint16"
            found["outlier"] = (vectors, 2 * count), "float16"
        if rank := min(self.rank, block_size, head_dim):
            found |= {"left": ((block_size, rank), "float16"), "right": ((head_dim, rank), "float16")}
        return found

    def _turned(self, x: Any, xp: Any) -> Any:
        """Returns blocks [..., B, H] with vectors last, or undoes that."""
        return xp.swapaxes(x, -1, -2) if self.side == "k" else x

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        block_size, head_dim = x.shape[-2:]
        kept, found = x, {}
        vectors = self._turned(x, xp)
        chosen = xp.zeros(vectors.shape, bool)
        if count := self._num_outliers(vectors.shape[-1]):
            index, chosen = extremes(vectors, count, xp)
            kept = self._turned(xp.where(chosen, vectors.mean(axis=-1, keepdims=True), vectors), xp)
            dtype = self.arrays(block_size, head_dim)["index"][1]
            values = xp.take_along_axis(vectors, index, axis=-1)
            found = {"index": index.astype(dtype), "outlier": values.astype(xp.float16)}
        found |= super().encode(kept, xp)
        if rank := min(self.rank, block_size, head_dim):
            error = xp.where(self._turned(chosen, xp), xp.float32(0), x - super().decode(found, xp))
            left, right = factors(error, rank, xp)
            found |= {"left": left.astype(xp.float16), "right": right.astype(xp.float16)}
        return found

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        x = super().decode(stored, xp)
        if "left" in stored:
            left, right = (stored[name].astype(xp.float32) for name in ("left", "right"))
            x = x + left @ xp.swapaxes(right, -1, -2)
        if "index" not in stored:
            return x
        vectors = self._turned(x, xp)
        places = stored["index"][..., None] == np.arange(vectors.shape[-1])
        exact = xp.where(places, stored["outlier"].astype(xp.float32)[..., None], xp.float32(0)).sum(axis=-2)
        return self._turned(xp.where(places.any(axis=-2), exact, vectors), xp)


def extremes(vectors: Any, count: int, xp: Any) -> tuple[Any, Any]:
    """Returns the indices [..., 2 * count] of the `count` largest and smallest numbers of vectors [..., n], and a mask
    of them [..., n]."""
    places, chosen, found = np.arange(vectors.shape[-1]), xp.zeros(vectors.shape, bool), []
    for sign in (1, -1) * count:
        at = xp.where(chosen, -xp.inf, sign * vectors).argmax(axis=-1)[..., None]
        chosen = chosen | (at == places)
        found.append(at)
    return xp.concatenate(found, axis=-1), chosen


def factors(x: Any, rank: int, xp: Any) -> tuple[Any, Any]:
    """Returns matrices left [..., B, r] and right [..., H, r] whose product approximates x [..., B, H], by a power
    iteration for the singular vectors with the largest values."""
    right = xp.asarray(np.random.default_rng(0).standard_normal((x.shape[-1], rank)), xp.float32)
    left = None
    for _ in range(NUM_ROUNDS):
        left = orthonormal(x @ right, xp)
        right = xp.swapaxes(x, -1, -2) @ left
    return left, right


def orthonormal(x: Any, xp: Any) -> Any:
    """Returns an orthonormal basis of the columns of x [..., n, r], by Gram-Schmidt; zeros for dependent columns."""
    columns: list[Any] = []
    for at in range(x.shape[-1]):
        column = x[..., at]
        for other in columns:
            column = column - (column * other).sum(axis=-1, keepdims=True) * other
        norm = xp.sqrt((column * column).sum(axis=-1, keepdims=True))
        columns.append(xp.where(norm > 1e-20, column / xp.maximum(norm, xp.float32(1e-20)), xp.float32(0)))
    return xp.stack(columns, axis=-1)


gear4, gear3, gear2 = (functools.partial(Gear, bits=bits) for bits in (4, 3, 2))
gear_l4, gear_l3, gear_l2 = (functools.partial(Gear, bits=bits, outliers=0.0) for bits in (4, 3, 2))
