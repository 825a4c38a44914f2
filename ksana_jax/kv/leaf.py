"""One array of a pool of blocks or of slots. No jax."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Axis of kv heads in the shape of each leaf, after layers and keys or values; of states, that of heads or channels.
KV_HEADS = 2


class Leaf(NamedTuple):
    """One array of the pool: [M, *shape], or [*shape] in one block. dtype is NumPy's name of its elements' type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in one block."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def with_heads(self, num_heads: int) -> Leaf:
        """Returns this leaf with another number of heads."""
        return self._replace(shape=(*self.shape[:KV_HEADS], num_heads, *self.shape[KV_HEADS + 1 :]))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"
