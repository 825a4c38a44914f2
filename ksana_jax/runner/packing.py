"""Several arrays in one vector of int32, which crosses between host and device in one transfer. Knows no steps."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Packing:
    """The places of some arrays in one vector.

    Args:
      like: a pytree of the arrays, or of their shapes; of int32, or other types of 32 bits, which keep their bits.

    Attributes:
      size: length of the vector.
    """

    def __init__(self, like: Any):
        leaves, self._structure = jax.tree.flatten(like)
        self._places, self.size = [], 0
        for leaf in leaves:
            begin, dtype = self.size, np.dtype(leaf.dtype)
            assert dtype.itemsize == 4, "an array of other than 32 bits cannot be packed"
            self.size += math.prod(leaf.shape)
            self._places.append((slice(begin, self.size), None if dtype == np.int32 else dtype, leaf.shape))

    def _parts(self, vector: Any) -> list[Any]:
        found = []
        for place, dtype, shape in self._places:
            part = vector[place]
            found.append((part if dtype is None else part.view(dtype)).reshape(shape))
        return found

    def unpack(self, vector: Any) -> Any:
        """Returns the pytree of arrays in a vector [size] of NumPy, as views, or of jax, under jit too."""
        return jax.tree.unflatten(self._structure, self._parts(vector))

    def pack(self, arrays: Any) -> np.ndarray:
        """Returns NumPy arrays, a pytree like `like`, as a vector [size]. The last ones may be missing, and any may be
        shorter along the first axis: the rest of the vector is undefined."""
        vector = np.empty(self.size, np.int32)
        for array, place in zip(jax.tree.leaves(arrays), self._parts(vector), strict=False):
            place[: len(array)] = array
        return vector


def packed(arrays: Any) -> jax.Array:
    """Returns the vector of a pytree of jax arrays, as `Packing` of them has it, under jit."""
    parts = [x.reshape(-1).view(jnp.int32) for x in jax.tree.leaves(arrays)]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
