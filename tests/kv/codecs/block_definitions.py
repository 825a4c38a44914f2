"""Definitions of block codecs in float64: loops over vectors, no packing, no jax."""

from __future__ import annotations

import numpy as np


def quantised(x: np.ndarray, bits: int) -> np.ndarray:
    """Asymmetric codes of one group of numbers [n], with a scale and a zero in float16."""
    zero = np.float64(np.float16(x.min()))
    scale = np.float64(np.float16((x.max() - x.min()) / (2**bits - 1)))
    return zero + np.clip(np.round((x - zero) / (scale or 1.0)), 0, 2**bits - 1) * scale


def groups(n: int, size: int) -> list[slice]:
    """Groups of `size` numbers, or of the largest number that divides both."""
    size = int(np.gcd(n, size))
    return [slice(start, start + size) for start in range(0, n, size)]


def kivi(x: np.ndarray, side: str, bits: int, group: int = 64) -> np.ndarray:
    """A block [B, H]: keys in groups of tokens of a channel, values in groups of channels of a token."""
    if side == "k":
        return kivi(x.T, "v", bits, group).T
    return np.stack([np.concatenate([quantised(v[part], bits) for part in groups(len(v), group)]) for v in x])


def outliers(v: np.ndarray, share: float) -> np.ndarray:
    """The half of `share` of a vector's numbers [n] at either end, at least one, as booleans."""
    count = max(round(len(v) * share / 2), 1) if share else 0
    order = np.argsort(v)
    return np.isin(np.arange(len(v)), [*order[:count], *order[len(v) - count :]])


def gear(x: np.ndarray, side: str, bits: int, share: float, rank: int) -> np.ndarray:
    """Codes of the vectors without their outliers, a low-rank approximation of the error, and the outliers."""
    vectors = x.T if side == "k" else x
    sparse = np.stack([outliers(v, share) for v in vectors])
    filled = np.where(sparse, vectors.mean(axis=1, keepdims=True), vectors)
    sparse, filled = (a.T if side == "k" else a for a in (sparse, filled))
    coded = kivi(filled, side, bits)
    if rank:
        error = np.where(sparse, 0.0, x - coded)
        right = np.float32(np.random.default_rng(0).standard_normal((x.shape[1], rank))).astype(np.float64)
        left = right
        for _ in range(3):
            left = np.linalg.qr(error @ right)[0]
            right = error.T @ left
        coded = coded + np.float16(left).astype(np.float64) @ np.float16(right).astype(np.float64).T
    return np.where(sparse, np.float16(x).astype(np.float64), coded)


# By name, for blocks [B, H] of one head: what is read of them.
DEFINITIONS = {f"kivi{bits}": lambda x, side, bits=bits: kivi(x, side, bits) for bits in (4, 3, 2)}
DEFINITIONS |= {
    f"{name}{bits}": lambda x, side, bits=bits, share=share, rank=rank: gear(x, side, bits, share, rank)
    for name, share, rank in (("gear", 0.02, 2), ("gear_l", 0.0, 2), ("kvquant", 0.01, 0))
    for bits in (4, 3, 2)
}
