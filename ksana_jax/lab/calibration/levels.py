"""Levels of KVQuant's codes: k-means over the numbers of many blocks, between the smallest and the largest of each."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.lab.calibration.sums import layer_sums
from ksana_jax.methods.codecs.gear import extremes
from ksana_jax.methods.codecs.kvquant import KVQuant
from ksana_jax.models.params import Params

# Tokens of a block, and bins of a histogram.
BLOCK, BINS = 64, 4096
ROUNDS = 300


def kvquant(params: Params, config: ModelConfig, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns 2^bits levels for keys ("k4") and values ("v4") of all layers, and of 3 and 2 bits, in steps of uniform
    codes: 0 is a group's smallest number, 2^bits - 1 the largest.

    They have the least sum of squared errors, each in the numbers' own unit (arXiv:2401.18079, section 3.3, without
    weights by sensitivity).
    """

    def histograms(layer, q, k, v):
        return () if k is None else (_histogram(k, "k"), _histogram(v, "v"))

    found = filter(None, layer_sums(params, config, tokens, histograms))
    levels = {}
    for side, counts in zip("kv", np.sum(list(found), axis=0), strict=True):
        levels |= {f"{side}{bits}": (2**bits - 1) * _means(counts, bits) for bits in (4, 3, 2)}
    return {name: x.astype(np.float32) for name, x in levels.items()}


def _histogram(x, side):
    """Returns where numbers x [T, K, H] are in their group's range, [BINS], each weighed by the range's square."""
    codec, (length, heads, size) = KVQuant(side), x.shape
    blocks = x[: length - length % BLOCK].astype(jnp.float32).reshape(-1, BLOCK, heads, size)
    # Vectors last, as in `Gear`.
    vectors = blocks.transpose(0, 2, 3, 1) if side == "k" else blocks.transpose(0, 2, 1, 3)
    _, outliers = extremes(vectors, codec._num_outliers(vectors.shape[-1]), jnp)
    kept = jnp.where(outliers, vectors.mean(axis=-1, keepdims=True), vectors)
    groups = kept.reshape(-1, math.gcd(vectors.shape[-1], codec.group))
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    span = high - low
    places = jnp.round((groups - low) / jnp.where(span > 0, span, 1) * (BINS - 1)).astype(jnp.int32)
    return jnp.zeros(BINS).at[places].add(jnp.broadcast_to(span * span, groups.shape))


def _means(counts: np.ndarray, bits: int) -> np.ndarray:
    """Returns 2^bits numbers in [0, 1], ascending, by Lloyd's algorithm from uniform ones."""
    places = np.linspace(0, 1, BINS)
    means = np.linspace(0, 1, 2**bits)
    for _ in range(ROUNDS):
        nearest = np.searchsorted((means[1:] + means[:-1]) / 2, places)
        weight = np.bincount(nearest, counts, len(means))
        total = np.bincount(nearest, counts * places, len(means))
        means = np.where(weight > 0, total / np.where(weight > 0, weight, 1), means)
    return means
