"""The host tier: slots for saves, reads and swapped blocks; writes replaced content to disk. No jax."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.counters import Counters
from ksana_jax.kv.disk.tier import BlockFacts, DiskTier
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.replacement import ReplacementPolicy
from ksana_jax.kv.tier import DEVICE, HOST, Node, Tier


class HostTier(Tier):
    """Manages a tier whose blocks (*slots*) are rows of an array.

    Args:
      data: [slots, ...] the blocks, preallocated.
      disk: the next tier; None for no disk tier. write: see `config.EngineConfig.cache_write`.

    Attributes:
      in_moves: slots with one extra owner until the pending moves that touch them are made.
    """

    def __init__(
        self,
        data: np.ndarray,
        index: PrefixIndex,
        replacement: ReplacementPolicy,
        counters: Counters,
        *,
        disk: DiskTier | None,
        write: str,
    ):
        super().__init__(HOST, len(data), index.block_size, replacement)
        self.data, self.disk, self.write = data, disk, write
        self.in_moves: list[int] = []
        self._index, self._counters = index, counters
        self._to_disk: list[Node] = []  # once the pending moves are made
        self._num_taken = 0, 0

    def take_slot(self) -> int | None:
        """Returns a slot with one owner, replacing cached content if none is free; None if all are owned."""
        if not self.pool.num_available:
            return None
        if not self.pool.num_free:
            node = self.victim()
            assert node is not None, "idle slots, and none of them can be replaced"
            if self.write != "drop" and node.at[DEVICE] < 0:
                self.write_to_disk(node)
            self._counters.replaced_host += 1
            self.drop(node)
            self._index.drop_if_empty(node)
        return int(self.pool.allocate(1)[0])

    def receive(self, node: Node, slot: int) -> None:
        """Records that a pending save copies a node's content to a slot whose one owner is the move."""
        self.in_moves.append(slot)
        self.put(node, slot)
        if self.write == "through":
            self.write_to_disk_later(node)

    def write_to_disk(self, node: Node) -> None:
        """Writes a node's content to disk, if a disk tier exists and lacks it."""
        if self.disk is not None and node.key not in self.disk:
            assert node.parent is not None
            facts = BlockFacts(node.key, node.parent.key, node.tokens, node.depth * self.pool.block_size)
            self.disk.write(facts, self.data[node.at[HOST]])

    def write_to_disk_later(self, node: Node) -> None:
        """Writes a node to disk once the pending moves have copied its content to the host."""
        if self.disk is not None:
            self._to_disk.append(node)

    def moves_taken(self) -> None:
        """Notes that a step makes the moves that are pending: others may be recorded before it has ended."""
        self._num_taken = len(self._to_disk), len(self.in_moves)

    def moves_made(self) -> None:
        """Marks the moves that were taken as complete."""
        (num_written, num_moved), self._num_taken = self._num_taken, (0, 0)
        if num_written:
            for node in self._to_disk[:num_written]:
                if node.at[HOST] >= 0:
                    self.write_to_disk(node)
            self._to_disk = self._to_disk[num_written:]
        if num_moved:
            slots, self.in_moves = np.array(self.in_moves[:num_moved], np.int32), self.in_moves[num_moved:]
            self.release(slots)
