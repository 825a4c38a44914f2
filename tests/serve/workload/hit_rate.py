"""The hits of an unlimited prefix cache on a workload."""

import numpy as np

from ksana_jax.serve.workload.items import Workload


def infinite_hit_rate(workload: Workload, block_size: int = 16) -> float:
    """Returns the fraction of prompt tokens that a prefix cache without a limit would have, in full blocks.

    Requests are looked up in order of their index, and each leaves its prompt and its answer in the cache.
    """
    known: set[int] = set()
    hits = total = 0
    for item in workload.items:
        prompt = item.tokens()
        chain = _chain(np.concatenate([prompt, item.output_tokens()]), block_size)
        total += len(prompt)
        for name in chain[: len(prompt) // block_size]:
            if name not in known:
                break
            hits += block_size
        known.update(chain)
    return hits / total


def _chain(tokens: np.ndarray, block_size: int) -> list[int]:
    names, name = [], 0
    for block in tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size):
        name = hash((name, block.tobytes()))
        names.append(name)
    return names
