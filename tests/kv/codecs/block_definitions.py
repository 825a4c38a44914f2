"""What block codecs make of a block, in float64 and from their definitions: loops over vectors, no packing, no jax."""

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


# By name, for blocks [B, H] of one head: what is read of them.
DEFINITIONS = {f"kivi{bits}": lambda x, side, bits=bits: kivi(x, side, bits) for bits in (4, 3, 2)}
