"""Reads from disk to the host on behalf of waiting sequences. Knows slots, files and a clock; no device.

A sequence reserves all of its reads or none: it gets a host slot for each block, or computes the tokens that it could
have read. No sequence holds some slots while it waits for more, so requests that each fit alone cannot deadlock.
Blocks that were read stay pinned until their sequence runs or ends.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from ksana_jax.kv.disk.tier import BlockFacts, DiskTier
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.state import KVState
from ksana_jax.kv.state_slots import StateSlots
from ksana_jax.kv.tier import HOST, Node

_NO_SLOTS = np.zeros(0, np.int32)


@dataclasses.dataclass
class Read:
    """One block, or state, on its way from disk to a slot of the host."""

    node: Node
    host: HostTier
    slot: int
    future: concurrent.futures.Future[bool]


@dataclasses.dataclass
class Reservation:
    """Host slots that one waiting sequence has reserved. pins: tiers and slots, including slots of finished reads."""

    deadline_s: float
    reads: list[Read]
    pins: list[tuple[HostTier, int]]

    def slots(self, host: HostTier) -> np.ndarray:
        """Pinned slots and slots of unfinished reads in a tier."""
        return _slots(host, [*self.pins, *((read.host, read.slot) for read in self.reads)])

    def unpin(self) -> None:
        """Releases the pinned slots."""
        for host, slot in self.pins:
            host.release(np.array([slot], np.int32))


class DiskReads:
    """Manages the disk reads of all waiting sequences.

    Args:
      index: has a node for every block that is read.
      host, disk: tiers that blocks are read to and from.
      clock: monotonic time in seconds. timeout_s: limit after which a sequence no longer waits for its reads.

    Attributes:
      states: slots for states of recurrent layers, which have tiers of their own; None without any.
    """

    def __init__(
        self,
        index: PrefixIndex,
        host: HostTier,
        disk: DiskTier,
        clock: Callable[[], float],
        timeout_s: float,
    ):
        self._index, self._host, self._disk = index, host, disk
        self._clock, self._timeout_s = clock, timeout_s
        self.states: StateSlots | None = None
        self._active: dict[KVState, Reservation] = {}
        self._late: list[Read] = []  # no sequence waits for them any more, but the disk still writes to their slots

    @property
    def num_pending(self) -> int:
        """Number of blocks that waiting sequences still expect from disk."""
        return sum(len(reserved.reads) for reserved in self._active.values())

    @property
    def num_reading(self) -> int:
        """Number of expected blocks that the disk has not read yet."""
        return sum(not read.future.done() for reserved in self._active.values() for read in reserved.reads)

    @property
    def enabled(self) -> bool:
        """True if the disk can be read."""
        return self._disk.enabled

    def _tiers(self, group: int) -> tuple[HostTier | None, DiskTier | None]:
        """Returns the tiers of a group of layers."""
        if self.states is not None and group == self.states.group:
            return self.states.host, self.states.disk
        return self._host, self._disk

    def has(self, key: bytes, group: int = 0) -> bool:
        """True if the disk has a block, or state, with this key in a group of layers."""
        _, disk = self._tiers(group)
        return disk is not None and key in disk

    def begin(self, state: KVState, found: list[list[Node]], depths: list[list[int]]) -> bool:
        """Starts reading blocks of a sequence; False without room for them or with nothing to wait for.

        Args:
          found: for each group of layers, the nodes of its leading blocks as far as known. depths: indices to read.
        """
        index, now = self._index, self._clock()
        reading = {read.node.key: other for other in self._active.values() for read in other.reads}
        keys = [state.links[group][depth].key for group, wanted in enumerate(depths) for depth in wanted]
        others = [reading[key] for key in keys if key in reading]
        if others:  # another sequence is already reading it: wait with that one
            if max(other.deadline_s for other in others) > now:
                return True
            return False
        state.has_read = True
        # Blocks already on the host must not be replaced to make room for the others.
        nodes = [node for of_group in found for node in of_group if node.at[HOST] >= 0]
        pins = [(host, node.at[HOST]) for node in nodes if (host := self._tiers(node.group)[0]) is not None]
        for host, slot in pins:
            host.pool.share(np.array([slot], np.int32))
        reserved, needed = Reservation(now + self._timeout_s, [], pins), collections.Counter[HostTier]()
        for group, wanted in enumerate(depths):
            if (host := self._tiers(group)[0]) is not None:
                needed[host] += len(wanted)
        if any(host.pool.num_available < count for host, count in needed.items()):
            reserved.unpin()
            return False
        self._active[state] = reserved
        for group, wanted in enumerate(depths):
            parent, (host, disk) = index.root(state.salt, group), self._tiers(group)
            for depth in range(max(wanted, default=-1) + 1):
                link = state.links[group][depth]
                node = index.child(parent, link.tokens, link.key)
                if node is None:
                    break
                if depth in wanted:
                    node.num_pins += 1  # first, because making room may drop the node from the index
                    assert host is not None and disk is not None
                    slot = host.take_slot()
                    assert slot is not None
                    facts = BlockFacts(link.key, parent.key, link.tokens, depth * index.block_size)
                    reserved.reads.append(Read(node, host, slot, disk.read(link.key, facts, host.data[slot])))
                parent = node
            index.drop_if_empty(parent)
        if not reserved.reads:  # other content has the same keys
            self.end(state)
        return bool(reserved.reads)

    def ready(self, state: KVState) -> bool:
        """True if a sequence waits for no reads; adds finished reads to the cache and abandons late ones."""
        reserved = self._active.get(state)
        if reserved is None or not reserved.reads:
            return True
        if not all(read.future.done() for read in reserved.reads):
            if self._clock() < reserved.deadline_s:
                return False
        for read in reserved.reads:
            if read.future.done():
                self._take_in(state, reserved, read)
            else:
                self._late.append(read)
            self._unpin(read.node)
        reserved.reads = []
        return True

    def _take_in(self, state: KVState, reserved: Reservation, read: Read) -> None:
        host = read.host
        if read.future.result() and read.node.at[HOST] < 0:
            host.put(read.node, read.slot)
            reserved.pins.append((host, read.slot))
            state.read.add(read.node)
        else:
            host.release(np.array([read.slot], np.int32))

    def _unpin(self, node: Node) -> None:
        node.num_pins -= 1
        self._index.drop_if_empty(node)

    def end(self, state: KVState) -> None:
        """Releases the reservation of a sequence that runs or has ended."""
        reserved = self._active.pop(state, None)
        if reserved is None:
            return
        reserved.unpin()
        for read in reserved.reads:
            self._late.append(read)
            self._unpin(read.node)

    def poll(self) -> None:
        """Frees the slots of late reads that have finished."""
        for read in [r for r in self._late if r.future.done()]:
            self._late.remove(read)
            read.host.release(np.array([read.slot], np.int32))

    def wait(self, timeout_s: float = 0.01) -> None:
        """Blocks until a read is done, for at most `timeout_s`."""
        futures = [read.future for reserved in self._active.values() for read in reserved.reads]
        self._disk.wait(futures, timeout_s)

    def reserved(self, state: KVState) -> np.ndarray:
        """Host slots of blocks that a sequence has reserved."""
        reserved = self._active.get(state)
        return _NO_SLOTS if reserved is None else reserved.slots(self._host)

    def all_reserved(self, host: HostTier) -> Iterator[np.ndarray]:
        """Yields the slots in a tier of each sequence with a reservation."""
        return (reserved.slots(host) for reserved in self._active.values())

    def late(self, host: HostTier) -> np.ndarray:
        """Slots in a tier of late reads, which no longer belong to a sequence."""
        return _slots(host, [(read.host, read.slot) for read in self._late])

    def reading(self) -> list[int]:
        """Host slots that the disk is writing blocks to."""
        reads = [read for reserved in self._active.values() for read in reserved.reads] + self._late
        return [read.slot for read in reads if read.host is self._host]


def _slots(host: HostTier, found: list[tuple[HostTier, int]]) -> np.ndarray:
    return np.array([slot for tier, slot in found if tier is host], np.int32)
