"""Rotated keys and values: numbers of a vector are mixed before they are quantised, so that none is an outlier."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from ksana_jax.kv.codecs.base import TransformedCodec
from ksana_jax.methods.codecs.packed import Packed


@dataclasses.dataclass(frozen=True)
class Hadamard(TransformedCodec):
    """Stores a vector by another codec after a rotation that spreads an outlier over all channels.

    The rotation is random signs, then a Hadamard matrix; of a head dim that is no power of two, a smaller matrix for
    each of equal parts.

    Source: QuaRot, arXiv:2404.00456, section 4, which folds the rotation of values into the weights.
    """

    def transform(self, x: Any, xp: Any) -> Any:
        return _product(x.astype(xp.float32) * _signs(x.shape[-1]), xp)

    def inverse(self, x: Any, xp: Any) -> Any:
        return _product(x, xp) * _signs(x.shape[-1])


@functools.cache
def _signs(head_dim: int) -> np.ndarray:
    return np.random.default_rng(0).choice(np.array([-1, 1], np.float32), head_dim)


def _product(x: Any, xp: Any) -> Any:
    """Returns the product with a symmetric Hadamard matrix of length 1, by log2 H additions of each number."""
    size = x.shape[-1] & -x.shape[-1]  # the largest power of two that divides it
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = xp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return x * np.float32(1 / math.sqrt(size))


hadamard4, hadamard3, hadamard2 = (functools.partial(Hadamard, Packed(bits)) for bits in (4, 3, 2))
