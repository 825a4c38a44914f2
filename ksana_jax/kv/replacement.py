"""Cache replacement policies: which cached block is replaced first. No jax, no pools.

A policy is a function from a cached block to its priority; the block with the lowest priority is replaced first. It is
called when a block becomes replaceable (it has no owner, and no cached block continues it) and again after each use. A
priority may therefore depend on the block's history and on `age`, but not on the current time.

A custom policy needs no entry here: `LLM(prefix_replacement="my_package.module:mine")`, or the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ksana_jax.core.plugins import resolve


class CachedBlock(Protocol):
    """Attributes of a cached block that a policy may use.

    inserted, last_use: counters that rise with each use of the cache. num_uses: number of hits.
    cost: of recomputing the block, relative to a block at the start of a sequence. depth: number of blocks before it.
    """

    inserted: int
    last_use: int
    num_uses: int
    cost: float
    depth: int


# (block, age) -> priority; age is the first number of the priority of the block replaced last, initially 0.
ReplacementPolicy = Callable[[CachedBlock, float], tuple[float, ...]]


REPLACEMENT_POLICIES: dict[str, str] = {
    name: f"ksana_jax.methods.replacement:{name}"
    for name in ("lru", "lfu", "fifo", "newest_subtree_first", "cost_aware")
}


def find_replacement_policy(spec: str | ReplacementPolicy) -> ReplacementPolicy:
    """Returns the policy of `EngineConfig.prefix_replacement`: a key of REPLACEMENT_POLICIES,
    "package.module:name", or a function.

    Raises:
      ConfigError: no policy has that name.
    """
    return resolve(spec, REPLACEMENT_POLICIES, "prefix_replacement")
