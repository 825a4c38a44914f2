"""Which keys each method reads, in float64, query by query, from the papers; without blocks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# (queries [G, H] of the heads that share keys, keys [B, H] of each whole block) -> score of each block
Scores = Callable[[np.ndarray, Sequence[np.ndarray]], Sequence[float]]


def quest(q, blocks) -> list[float]:
    """Algorithm 1 of arXiv:2406.10774, and the highest bound of any head."""
    return [max(np.maximum(one * keys.min(axis=0), one * keys.max(axis=0)).sum() for one in q) for keys in blocks]


def rocketkv(q, blocks, top_r: int) -> np.ndarray:
    """Hybrid sparse attention of arXiv:2502.14051, with a block for a token of the softmax."""
    mean = np.abs(q).mean(axis=0)
    chosen = sorted(range(len(mean)), key=lambda d: -mean[d])[:top_r]
    weights = np.zeros((len(q), len(blocks)))
    for head, one in enumerate(q):
        temperature = np.sqrt(np.abs(one[chosen]).sum() / np.abs(one).sum())
        for block, keys in enumerate(blocks):
            picked = np.where(q.sum(axis=0) > 0, keys.max(axis=0), keys.min(axis=0))
            weights[head, block] = np.exp((one * picked)[chosen].sum() / temperature)
    return (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)


def blocks_read(scores: Scores, q, k, position: int, size: int, budget: int) -> set[int]:
    """Returns the blocks of a text that a query reads.

    Args:
      q: [G, H] of the heads that share the keys k [T, H]. budget: tokens.
    """
    newest = position // size
    found = scores(q, [k[block * size : (block + 1) * size] for block in range(newest)]) if newest else []
    middle = sorted(range(1, newest), key=lambda block: -found[block])
    return set([*dict.fromkeys((0, newest)), *middle][: budget // size])


def keys_read(scores: Scores, q, k, size: int, budget: int, first: int = 0):
    """Returns which keys each query reads: [N, T, T] bool.

    Args:
      q: [T, N, H]. k: [T, K, H]. first: position of the first query that selects; the others read all.
    """
    t, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    found = np.tri(t, dtype=bool)[None].repeat(heads, axis=0)
    for position in range(first, t):
        for head in range(kv_heads):
            queries = slice(head * group, (head + 1) * group)
            blocks = blocks_read(scores, q[position, queries], k[:, head], position, size, budget)
            found[queries, position] &= np.isin(np.arange(t) // size, list(blocks))
    return found
