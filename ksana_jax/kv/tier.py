"""A memory tier: its pool, the cached content of its blocks, and their order of replacement. No jax."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ksana_jax.kv.block_manager import BlockManager
from ksana_jax.kv.replacement import ReplacementPolicy

DEVICE, HOST = 0, 1
NOWHERE = -1


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """The content of one full block, on any tier: its tokens and all tokens before them.

    Args:
      key: SHA-256 of the parent's key and the tokens.
      parent: node of the preceding block; None for the root of a salt.
      tokens: int32 bytes of the block's tokens; of a root, its salt.
      depth: number of blocks before it; its sequence position is depth * B.
      cost, inserted, last_use, num_uses: see `replacement.CachedBlock`.
      group: the group of layers whose keys and values it holds.

    Attributes:
      at: block id on the device and on the host; NOWHERE on a tier that does not store it.
      num_children: nodes that continue it. num_children_at: those on the device, on the host.
      num_pins: reads in flight that will place it on a tier.
      known: True if the index has it. A node without children that no tier stores is dropped.
    """

    key: bytes
    parent: Node | None
    tokens: bytes
    depth: int
    cost: float = 1.0
    inserted: int = 0
    last_use: int = 0
    num_uses: int = 0
    group: int = 0
    at: list[int] = dataclasses.field(default_factory=lambda: [NOWHERE, NOWHERE])
    num_children: int = 0
    num_children_at: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    num_pins: int = 0
    known: bool = False

    @property
    def is_stored(self) -> bool:
        return self.at[DEVICE] >= 0 or self.at[HOST] >= 0


class CacheListener(Protocol):
    """Called when tiers cache, use and drop blocks, at the moment of bookkeeping; it may look, but change nothing."""

    def stored(self, node: Node, level: int) -> None:
        """Called when a tier stores this content."""

    def dropped(self, node: Node, level: int) -> None:
        """Called when a tier drops this content."""

    def used(self, node: Node) -> None:
        """Called when a sequence takes this content, which is on the device, instead of computing it."""

    def cleared(self) -> None:
        """Called when all tiers drop everything."""


class Tier:
    """A pool that can keep blocks for their content after their owners leave.

    Args:
      level: DEVICE or HOST.

    Attributes:
      leaves_first: for each group of layers, True if a block must stay while a cached block continues it. If a pattern
        is unbounded, a block is useful only with all blocks before it; under a window, only the last are needed.
      listeners: hear when content is cached, used and dropped.
    """

    def __init__(self, level: int, num_blocks: int, block_size: int, policy: ReplacementPolicy):
        self.level, self.policy = level, policy
        self.pool = BlockManager(num_blocks, block_size)
        self.leaves_first = [True]
        self.listeners: Sequence[CacheListener] = ()
        self.node_of: dict[int, Node] = {}
        self.age = 0.0
        self._heap: list[tuple[tuple[float, ...], int, int, Node]] = []
        self._numbers = itertools.count()

    def put(self, node: Node, block: int) -> None:
        """Records that a held block has a node's content, and keeps it when its owners leave."""
        assert node.at[self.level] < 0 and block not in self.node_of
        node.at[self.level] = block
        self.node_of[block] = node
        self.pool.keep(block)
        if node.parent is not None:
            node.parent.num_children_at[self.level] += 1
        for listener in self.listeners:
            listener.stored(node, self.level)

    def drop(self, node: Node) -> None:
        """Forgets a node's content on this tier; its block is free once it has no owner."""
        block, parent = node.at[self.level], node.parent
        del self.node_of[block]
        node.at[self.level] = NOWHERE
        self.pool.forget(block)
        if parent is not None:
            parent.num_children_at[self.level] -= 1
            self._consider(parent)
        for listener in self.listeners:
            listener.dropped(node, self.level)

    def release(self, ids: np.ndarray) -> None:
        """Removes one owner from each of some blocks."""
        for block in self.pool.release(ids).tolist():
            self._consider(self.node_of[block])

    def touch(self, node: Node) -> None:
        """Updates a node whose priority may have changed."""
        if node.at[self.level] >= 0:
            self._consider(node)

    def victim(self) -> Node | None:
        """Returns the node to replace next, which the caller must drop; None if every block is owned."""
        while self._heap:
            priority, last_use, _, node = self._heap[0]
            if last_use == node.last_use and self._replaceable(node):
                self.age = priority[0]
                return node
            heapq.heappop(self._heap)
        # The remaining blocks without owners precede content that is being moved; replace them rather than nothing.
        ownerless = (node for block, node in self.node_of.items() if not self.pool.ref_count[block])
        return min(ownerless, key=lambda node: (-node.depth, self.policy(node, self.age)), default=None)

    def set_leaves_first(self, leaves_first: list[bool]) -> None:
        """Changes which blocks may be replaced."""
        if leaves_first != self.leaves_first:
            self.leaves_first = leaves_first
            self._heap.clear()
            for node in self.node_of.values():
                self._consider(node)

    def _replaceable(self, node: Node) -> bool:
        block = node.at[self.level]
        if block < 0 or self.pool.ref_count[block]:
            return False
        return not (self.leaves_first[node.group] and node.num_children_at[self.level])

    def _consider(self, node: Node) -> None:
        if self._replaceable(node):
            entry = (self.policy(node, self.age), node.last_use, next(self._numbers), node)
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 4 * len(self.node_of) + 64:  # mostly entries of blocks that were used again
                self._heap = [e for e in self._heap if e[1] == e[3].last_use and self._replaceable(e[3])]
                heapq.heapify(self._heap)

    def check(self) -> None:
        """Checks nodes against the pool.

        Raises:
          AssertionError: they disagree, or an idle block could never be replaced.
        """
        assert set(np.flatnonzero(self.pool.kept).tolist()) == set(self.node_of)
        entered = {id(node) for _, last_use, _, node in self._heap if last_use == node.last_use}
        for block, node in self.node_of.items():
            assert node.at[self.level] == block and node.known
            if self._replaceable(node):
                assert id(node) in entered, "a replaceable block is not considered"
