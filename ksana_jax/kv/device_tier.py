"""The device tier: allocates, shares, copies and loads blocks, and replaces cached ones. No jax."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.block_manager import NoFreeBlocks
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.moves import PendingMoves
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.replacement import ReplacementPolicy
from ksana_jax.kv.tier import DEVICE, HOST, Node, Tier


class DeviceTier(Tier):
    """Manages the fastest tier, the only one whose blocks a step reads and writes.

    Args:
      moves: collects copies to and from its blocks. host: receives replaced content; None for no host tier.
      write: see `config.EngineConfig.cache_write`.

    Attributes:
      needed_by: the `Sequence` for which blocks are taken and others replaced, for reports; None if there is none.
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex,
        replacement: ReplacementPolicy,
        counters: Counters,
        *,
        moves: PendingMoves,
        host: HostTier | None,
        write: str,
    ):
        super().__init__(DEVICE, num_blocks, index.block_size, replacement)
        self._index, self._counters, self._moves = index, counters, moves
        self._host, self._write = host, write
        self.needed_by: object = None

    def allocate(self, count: int) -> np.ndarray:
        """Takes `count` blocks, replacing cached prefixes if too few are free: ids [count].

        Raises:
          NoFreeBlocks: fewer are available; nothing is taken.
        """
        pool = self.pool
        if count > pool.num_available:
            raise NoFreeBlocks(f"{count} blocks requested, {pool.num_available} of {pool.num_blocks} available")
        while pool.num_free < count:
            self._replace_one()
        return pool.allocate(count)

    def release(self, ids: np.ndarray) -> None:
        """Removes one owner from each of some blocks."""
        for block in self.pool.release(ids).tolist():
            self._consider(self.node_of[block])
        copies, loads = self._moves.copies, self._moves.loads
        if copies or loads:
            for block in ids[self.pool.ref_count[ids] == 0].tolist():
                copies.pop(block, None)  # its owner has released it
                if not self.pool.kept[block]:
                    loads.pop(block, None)

    def is_shared(self, ids: np.ndarray) -> np.ndarray:
        """Returns for each of some blocks whether it must be copied before one of its owners writes to it."""
        return (self.pool.ref_count[ids] > 1) | self.pool.kept[ids]

    def copy(self, block: int) -> int:
        """Copies a shared block for one of its owners, releases the shared one, and returns the copy."""
        (new,) = self.allocate(1).tolist()
        if (slot := self._moves.loads.get(block)) is None:
            self._moves.copy(block, new)
        else:  # copies come before loads: load it twice
            assert self._host is not None
            self._host.pool.share(np.array([slot], np.int32))
            self._host.in_moves.append(slot)
            self._moves.load(slot, new)
        self.release(np.array([block], np.int32))
        return new

    def load(self, nodes: list[Node], count: int) -> None:
        """Allocates blocks for the `count` pinned nodes that are not on the device yet, and loads them from the host.

        Their pins on the host are transferred to the moves.
        """
        new = self.allocate(count).tolist()
        for node in nodes:
            if node.at[DEVICE] < 0:
                assert self._host is not None
                block = new.pop()
                self._moves.load(node.at[HOST], block)
                self._host.in_moves.append(node.at[HOST])
                self.put(node, block)

    def keep(self, node: Node, block: int) -> None:
        """Caches a block that holds a node's content, which has just been computed."""
        self.put(node, block)
        if self._write == "through":
            self.save(node)

    def save(self, node: Node) -> None:
        """Copies a node to the host tier unless it is already there or the tier is full."""
        if self._host is None or node.at[HOST] >= 0:
            return
        slot = self._host.take_slot()
        if slot is not None:
            self._moves.save(node.at[DEVICE], slot)
            self._host.receive(node, slot)

    def forget(self, block: int) -> None:
        """Takes a held block out of the cache, so that its only owner may write to it."""
        self._drop_saved(self.node_of[block])

    def _replace_one(self) -> None:
        node = self.victim()
        assert node is not None, "idle blocks, and none of them can be replaced"
        self._counters.replaced += 1
        self._moves.loads.pop(node.at[DEVICE], None)
        self._drop_saved(node)

    def _drop_saved(self, node: Node) -> None:
        """Drops a node here; the host tier receives it, unless writes are dropped."""
        if self._write != "drop":
            self.save(node)
        self.drop(node)
        self._index.drop_if_empty(node)
