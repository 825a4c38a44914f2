"""Cache replacement policies: which cached block is replaced first. No jax, no pools.

A policy is a function from a cached block to its priority; the block with the lowest priority is replaced first. It is
called when a block becomes replaceable (it has no owner, and no cached block continues it) and again after each use. A
priority may therefore depend on the block's history and on `age`, but not on the current time.

A custom policy needs no entry here: `LLM(prefix_replacement="my_package.module:mine")`, or the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ksana_jax.plugins import resolve


class CachedBlock(Protocol):
    """Attributes of a cached block that a policy may use.

    inserted, last_use: counters that rise with each use of the cache. num_uses: number of hits.
    cost: of recomputing the block, relative to a block at the beginning of a text. depth: number of blocks before it.
    """

    inserted: int
    last_use: int
    num_uses: int
    cost: float
    depth: int


# (block, age) -> priority; age is the first number of the priority of the block replaced last, initially 0.
ReplacementPolicy = Callable[[CachedBlock, float], tuple[float, ...]]


def lru(block: CachedBlock, age: float) -> tuple[float, ...]:
    """Replaces the least recently used block; among blocks last used together, the deepest."""
    return (block.last_use, -block.depth)


def lfu(block: CachedBlock, age: float) -> tuple[float, ...]:
    """Replaces the least often used block; among equals, the least recently used."""
    return (block.num_uses, block.last_use, -block.depth)


def fifo(block: CachedBlock, age: float) -> tuple[float, ...]:
    """Replaces the block that was inserted first."""
    return (block.inserted, -block.depth)


def newest_subtree_first(block: CachedBlock, age: float) -> tuple[float, ...]:
    """Replaces the block that was inserted last, regardless of hits: old shared prefixes stay (as in KsanaLLM)."""
    return (-block.inserted, -block.depth)


def cost_aware(block: CachedBlock, age: float) -> tuple[float, ...]:
    """Replaces the block with the lowest recomputation cost x number of uses (all blocks have one size), with ageing.

    Once-popular blocks age: the priority of a new block starts at that of the block replaced last.

    Source: GreedyDual-Size-Frequency, Cherkasova, HPL-98-69R1.
    """
    return (age + (1 + block.num_uses) * block.cost, block.last_use)


REPLACEMENT_POLICIES: dict[str, ReplacementPolicy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "newest_subtree_first": newest_subtree_first,
    "cost_aware": cost_aware,
}


def find_replacement_policy(spec: str | ReplacementPolicy) -> ReplacementPolicy:
    """Returns the policy of `EngineConfig.prefix_replacement`: a key of REPLACEMENT_POLICIES,
    "package.module:name", or a function.

    Raises:
      ConfigError: there is no policy of that name.
    """
    return resolve(spec, REPLACEMENT_POLICIES, "prefix_replacement")
