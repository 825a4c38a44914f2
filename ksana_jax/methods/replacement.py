"""Cache replacement policies, as `kv.replacement` defines them: which cached block is replaced first."""

from __future__ import annotations

from ksana_jax.kv.replacement import CachedBlock


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

    Once-popular blocks age: the priority of a new block starts at the priority of the block replaced last.

    Source: GreedyDual-Size-Frequency, Cherkasova, HPL-98-69R1.
    """
    return (age + (1 + block.num_uses) * block.cost, block.last_use)
