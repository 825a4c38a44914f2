"""Quest (arXiv:2406.10774, algorithm 1) in float64, query by query, from the paper; without blocks of a pool."""

from __future__ import annotations

import numpy as np


def blocks_read(q, k, position: int, size: int, budget: int) -> set[int]:
    """Returns the blocks of a text that a query reads.

    Args:
      q: [G, H] of the heads that share the keys k [T, H]. budget: tokens.
    """
    newest = position // size
    bounds = []
    for block in range(newest + 1):
        keys = k[block * size : min((block + 1) * size, position + 1)]
        least, most = keys.min(axis=0), keys.max(axis=0)
        bounds.append(max(sum(max(x * a, x * b) for x, a, b in zip(one, least, most, strict=True)) for one in q))
    middle = sorted(range(1, newest), key=lambda block: -bounds[block])
    return set([*dict.fromkeys((0, newest)), *middle][: budget // size])


def keys_read(q, k, size: int, budget: int, first: int = 0):
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
            blocks = blocks_read(q[position, queries], k[:, head], position, size, budget)
            found[queries, position] &= np.isin(np.arange(t) // size, list(blocks))
    return found
