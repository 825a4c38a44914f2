"""Which cached block goes first when room is needed: cache replacement policies. No jax, no pools.

A policy is one function from a cached block to its priority; the block of the smallest priority goes first. It is
called when a block becomes replaceable (nobody owns it, and no cached block continues it), and again after each use,
never in between: a priority may depend on what happened to the block and on `age`, not on the current time.

A policy of your own needs no entry here: `LLM(prefix_replacement="my_package.module:mine")`, or the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ksana_jax.plugins import resolve


class Cached(Protocol):
    """What a policy may look at.

    inserted, last_use: counts that rise with each use of the cache. num_uses: times it was found again.
    cost: of computing the block anew, in units of a block at the beginning of a text. depth: blocks before it.
    """

    inserted: int
    last_use: int
    num_uses: int
    cost: float
    depth: int


# (block, age) -> priority; age is the first number of the priority of the block replaced last, 0 in the beginning.
Policy = Callable[[Cached, float], tuple[float, ...]]


def lru(block: Cached, age: float) -> tuple[float, ...]:
    """Least recently used; of those used together the deepest."""
    return (block.last_use, -block.depth)


def lfu(block: Cached, age: float) -> tuple[float, ...]:
    """Least often used, then least recently."""
    return (block.num_uses, block.last_use, -block.depth)


def fifo(block: Cached, age: float) -> tuple[float, ...]:
    """First inserted."""
    return (block.inserted, -block.depth)


def newest_subtree_first(block: Cached, age: float) -> tuple[float, ...]:
    """Last inserted, hits notwithstanding: long-lived shared prefixes stay, recent suffixes go (as KsanaLLM does)."""
    return (-block.inserted, -block.depth)


def cost_aware(block: Cached, age: float) -> tuple[float, ...]:
    """Cost of computing it anew x number of uses, per byte (all blocks are of one size), with ageing.

    What was once popular ages: others begin at the priority of the block replaced last.

    Source: GreedyDual-Size-Frequency, Cherkasova, HPL-98-69R1.
    """
    return (age + (1 + block.num_uses) * block.cost, block.last_use)


POLICIES: dict[str, Policy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "newest_subtree_first": newest_subtree_first,
    "cost_aware": cost_aware,
}


def find_policy(spec: str | Policy) -> Policy:
    """Returns what `EngineConfig.prefix_replacement` names: a key of POLICIES, "package.module:name", or a function.

    Raises:
      ConfigError: there is none of that name.
    """
    return resolve(spec, POLICIES, "prefix_replacement")
