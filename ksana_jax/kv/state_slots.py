"""Slots for states of recurrent layers: owned by rows, or cached as snapshots at the ends of blocks. No jax.

A snapshot is a slot that nothing writes to any more, indexed as the block that ends there. A row that continues from
one reads it, and writes the next state to another slot. On host and disk, states move as blocks do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.block_manager import NoFreeBlocks
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.moves import PendingMoves
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.replacement import ReplacementPolicy
from ksana_jax.kv.state import KVState
from ksana_jax.kv.swap import Costs, Swap
from ksana_jax.kv.tier import DEVICE, CacheListener, Node, Tier


class StateSlots(DeviceTier):
    """The pool of slots on the device.

    Args:
      group: number of the recurrent layers' group, after those of blocks.
      counters: of snapshots; moves have their own, see `own_counters`.
      host_data: [slots, ...] the host's slots, preallocated; None for no host tier. disk: the disk tier, or None.
      listeners: see `Tier`.

    Attributes:
      moves: pending copies of slots. host: tier of slots on the host; None without one.
      swap: of preempted rows' states; None without a host tier.
    """

    def __init__(
        self,
        num_slots: int,
        group: int,
        index: PrefixIndex,
        replacement: ReplacementPolicy,
        counters: Counters,
        *,
        write: str,
        host_data: np.ndarray | None,
        disk: DiskTier | None,
        listeners: Sequence[CacheListener] = (),
    ):
        self.group, self.disk, self.own_counters = group, disk, Counters()
        self.moves, self.host, self.swap = PendingMoves(self.own_counters), None, None
        settings = index, replacement, self.own_counters
        if host_data is not None and len(host_data):
            self.host = HostTier(host_data, *settings, disk=disk, write=write)
        super().__init__(num_slots, *settings, moves=self.moves, host=self.host, write=write)
        self._snapshots = counters
        if self.host is not None:
            self.swap = Swap(self, self.host, self.moves, self.own_counters, preempt="swap", costs=Costs())
        for tier in (self, self.host):
            if tier is not None:
                tier.leaves_first, tier.listeners = [False] * (group + 1), listeners

    def take(self) -> int:
        """Takes a slot, replacing a snapshot if none is free.

        Raises:
          NoFreeBlocks: all slots are owned.
        """
        if not self.pool.num_available:
            raise NoFreeBlocks(f"all {self.pool.num_blocks} state slots are in use")
        return int(self.allocate(1)[0])

    def share(self, slot: int) -> None:
        """Adds an owner to a slot."""
        self.pool.share(np.array([slot], np.int32))

    def give_back(self, slot: int) -> None:
        """Removes one owner from a slot."""
        self.release(np.array([slot], np.int32))

    def swap_out(self, slot: int) -> int | None:
        """Saves a slot to the host; returns its slot there, or None if there is no room."""
        if self.swap is None or self.host is None or not self.host.pool.num_available:
            return None
        return int(self.swap.move_out(np.array([slot]))[0])

    def swap_in(self, slot: int) -> int:
        """Loads a host slot into a slot that it takes, and releases it."""
        assert self.swap is not None
        return int(self.swap.move_in(np.array([slot], np.int32))[0])

    def take_away(self, state: KVState) -> None:
        """Releases the slot that a waiting sequence holds, if any."""
        if state.held is None or state.held.state == FAR:
            return
        if state.shared is not None:
            self.give_back(state.shared.state)
        elif self.swap is not None:
            self.swap.discard(np.array([state.held.state], np.int32))

    def cache(self, state: KVState, token_ids: np.ndarray, num_tokens: int, slot: int) -> None:
        """Caches a slot as the state after the first num_tokens tokens of a text, whole blocks of them, unless that is
        cached already. Its cost is that of the tokens since the last state that is cached now."""
        index, node = self._index, self._index.root(state.salt, self.group)
        links = index.chain(token_ids, state.salt, state.links[self.group], num_tokens // index.block_size, self.group)
        cost = 0.0
        for key, tokens in links[: num_tokens // index.block_size]:
            cost = index.cost((node.depth + 1) * index.block_size) + (0.0 if node.is_stored else cost)
            before, node = node, index.child(node, tokens, key)
            if node is None:  # other content has the same key
                index.drop_if_empty(before)
                return
        if node.at[DEVICE] < 0:
            node.cost = cost
            if not node.is_stored:
                node.inserted = node.last_use = index.tick()
            self.keep(node, slot)
            self._snapshots.snapshots += 1

    def pin(self, node: Node) -> None:
        """Pins a snapshot where it is."""
        tier, slot = self._where(node)
        tier.pool.share(slot)

    def unpin(self, node: Node) -> None:
        """Unpins a snapshot, which has not moved since."""
        tier, slot = self._where(node)
        tier.release(slot)

    def _where(self, node: Node) -> tuple[Tier, np.ndarray]:
        tier = self if node.at[DEVICE] >= 0 or self.host is None else self.host
        return tier, np.array([node.at[tier.level]], np.int32)

    def claim(self, node: Node) -> int:
        """Returns the slot of a pinned snapshot that a row begins with, after loading it if need be."""
        if node.at[DEVICE] < 0:
            self.load([node], 1)
        node.last_use, node.num_uses = self._index.tick(), node.num_uses + 1
        if self.host is not None:
            self.host.touch(node)
        return node.at[DEVICE]

    def check(self) -> None:
        """See `Tier.check`."""
        super().check()
        if self.host is not None:
            self.host.check()

    def _replace_one(self) -> None:
        self._snapshots.replaced_states += 1
        super()._replace_one()
