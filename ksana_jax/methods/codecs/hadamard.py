"""Rotated keys and values: numbers of a vector are mixed before they are quantised, so that none is an outlier."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.methods.codecs.packed import Packed


@dataclasses.dataclass(frozen=True)
class Hadamard(Packed):
    """Stores a vector as `Packed` does, after a rotation that spreads an outlier over all channels.

    The rotation is random signs, then a Hadamard matrix; of a head dim that is no power of two, a smaller matrix for
    each of equal parts. Queries stay as they are: vectors are rotated back when they are read.

    Source: QuaRot, arXiv:2404.00456, section 4, which rotates queries and keys, and folds the rotation of values into
    the weights.
    """

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        return super().encode(rotated(x, xp), xp)

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        return rotated_back(super().decode(stored, xp), xp)


def rotated(x: Any, xp: Any) -> Any:
    """Returns vectors [..., H] in float32, rotated; the same rotation in every head and layer."""
    return _transformed(x.astype(xp.float32) * _signs(x.shape[-1]), xp)


def rotated_back(x: Any, xp: Any) -> Any:
    """Returns the vectors [..., H] that `rotated` has rotated."""
    return _transformed(x, xp) * _signs(x.shape[-1])


@functools.cache
def _signs(head_dim: int) -> np.ndarray:
    return np.random.default_rng(0).choice(np.array([-1, 1], np.float32), head_dim)


def _transformed(x: Any, xp: Any) -> Any:
    """Returns the product with a symmetric Hadamard matrix of length 1, by log2 H additions of each number."""
    size = x.shape[-1] & -x.shape[-1]  # the largest power of two that divides it
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = xp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return x * np.float32(1 / math.sqrt(size))


hadamard4, hadamard3, hadamard2 = (functools.partial(Hadamard, bits) for bits in (4, 3, 2))
