"""Token ids as a function of a key and a position: made on demand, equal in every process, without a generator's state.

SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) maps key and position to
64 bits, which are reduced to the vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np

# Ids below are special tokens in the models that we ship: padding, begin, end.
FIRST_TOKEN = 3
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: int | str) -> int:
    """Returns a key of 64 bits for a sequence of numbers and names."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def stream(key: int, start: int, count: int, vocab_size: int) -> np.ndarray:
    """Returns tokens start, ..., start + count - 1 of the endless text of a key, [count] int32."""
    positions = np.arange(start, start + count, dtype=np.uint64)
    return _reduced(_mixed(np.uint64(key) + (positions + np.uint64(1)) * _GOLDEN), vocab_size)


def streams(key: int, ids: np.ndarray, count: int, vocab_size: int) -> np.ndarray:
    """Returns the first `count` tokens of the texts that a key and each id name, [len(ids), count] int32."""
    keys = _mixed(np.asarray(ids, np.int64).astype(np.uint64) * _GOLDEN ^ np.uint64(key))
    positions = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    return _reduced(_mixed(keys[:, None] + positions), vocab_size)


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _reduced(z: np.ndarray, vocab_size: int) -> np.ndarray:
    return (z % np.uint64(vocab_size - FIRST_TOKEN)).astype(np.int32) + np.int32(FIRST_TOKEN)
