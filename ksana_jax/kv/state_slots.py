"""Slots for states of recurrent layers: owned by rows, or cached as snapshots at the ends of blocks. No jax.

A snapshot is a slot that nothing writes to any more, indexed as the block that ends there. A row that continues from
one reads it, and writes the next state to another slot.
"""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.block_manager import NoFreeBlocks
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.replacement import ReplacementPolicy
from ksana_jax.kv.state import KVState
from ksana_jax.kv.tier import DEVICE, Node, Tier


class StateSlots(Tier):
    """The pool of slots.

    Args:
      group: number of the recurrent layers' group, after those of blocks.
    """

    def __init__(
        self, num_slots: int, group: int, index: PrefixIndex, replacement: ReplacementPolicy, counters: Counters
    ):
        super().__init__(DEVICE, num_slots, index.block_size, replacement)
        self.group, self._index, self._counters = group, index, counters
        self.leaves_first = [False] * (group + 1)

    def take(self) -> int:
        """Takes a slot, replacing a snapshot if none is free.

        Raises:
          NoFreeBlocks: all slots are owned.
        """
        if not self.pool.num_free:
            if (node := self.victim()) is None:
                raise NoFreeBlocks(f"all {self.pool.num_blocks} state slots are in use")
            self._counters.replaced_states += 1
            self._forget(node)
        return int(self.pool.allocate(1)[0])

    def share(self, slot: int) -> None:
        """Adds an owner to a slot."""
        self.pool.share(np.array([slot], np.int32))

    def give_back(self, slot: int) -> None:
        """Removes one owner from a slot."""
        self.release(np.array([slot], np.int32))

    def keep(self, state: KVState, token_ids: np.ndarray, num_tokens: int, slot: int) -> None:
        """Caches a slot as the state after the first num_tokens tokens of a text, whole blocks of them, unless that is
        cached already."""
        index, node = self._index, self._index.root(state.salt, self.group)
        links = index.chain(token_ids, state.salt, state.links[self.group], num_tokens // index.block_size, self.group)
        for key, tokens in links[: num_tokens // index.block_size]:
            before, node = node, index.child(node, tokens, key)
            if node is None:  # other content has the same key
                index.drop_if_empty(before)
                return
        if node.at[DEVICE] < 0:
            node.inserted = node.last_use = index.tick()
            self.put(node, slot)
            self._counters.snapshots += 1

    def claim(self, node: Node) -> int:
        """Returns the slot of a pinned snapshot that a row begins with."""
        node.last_use, node.num_uses = self._index.tick(), node.num_uses + 1
        return node.at[DEVICE]

    def clear(self) -> None:
        """Forgets all snapshots, while nothing runs."""
        for node in list(self.node_of.values()):
            self._forget(node)

    def _forget(self, node: Node) -> None:
        self.drop(node)
        self._index.drop_if_empty(node)
