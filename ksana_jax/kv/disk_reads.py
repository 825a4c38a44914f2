"""Reads from disk to the host on behalf of waiting sequences. Knows slots, files and a clock; no device.

A sequence's reads are reserved as a whole: it gets a slot of the host for each block or none at all, in which case it
computes what it could have read. So nobody holds some slots while it waits for more, and requests that each fit alone
cannot lock each other out. What was read stays pinned until its sequence runs or ends.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from ksana_jax.kv.disk.tier import BlockFacts, DiskTier
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.state import KVState
from ksana_jax.kv.tier import HOST, Node

_NO_SLOTS = np.zeros(0, np.int32)


@dataclasses.dataclass
class Read:
    """One block on its way from disk to a slot of the host."""

    node: Node
    slot: int
    future: concurrent.futures.Future[bool]


@dataclasses.dataclass
class Reservation:
    """What one waiting sequence has reserved. slots: pinned, those of reads that are done among them."""

    deadline_s: float
    reads: list[Read]
    slots: list[int]

    @property
    def all_slots(self) -> np.ndarray:
        """Pinned slots, and those of reads that are not done."""
        return np.array(self.slots + [read.slot for read in self.reads], np.int32)


class DiskReads:
    """Reads of all waiting sequences.

    Args:
      index: has a node for every block that is read.
      host, disk: where blocks are read to and from; without both there is nothing to read.
      clock: seconds, rising. timeout_s: after which a sequence no longer waits for its reads.
    """

    def __init__(
        self,
        index: PrefixIndex,
        host: HostTier | None,
        disk: DiskTier | None,
        clock: Callable[[], float],
        timeout_s: float,
    ):
        self._index, self._host, self._disk = index, host, disk
        self._clock, self._timeout_s = clock, timeout_s
        self._active: dict[KVState, Reservation] = {}
        self._late: list[Read] = []  # nobody waits for them any more, and their slots are still written to

    @property
    def num_pending(self) -> int:
        """Blocks that waiting sequences still expect from disk."""
        return sum(len(reserved.reads) for reserved in self._active.values())

    @property
    def num_reading(self) -> int:
        """Those of them that the disk has not read yet."""
        return sum(not read.future.done() for reserved in self._active.values() for read in reserved.reads)

    @property
    def enabled(self) -> bool:
        """Whether there is a disk to read from."""
        return self._host is not None and self._disk is not None and self._disk.enabled

    def has(self, key: bytes) -> bool:
        """Whether the disk has a block of that key."""
        return self._disk is not None and key in self._disk

    def begin(self, state: KVState, found: list[list[Node]], depths: list[list[int]]) -> bool:
        """Starts to read some blocks of a sequence; False if there is no room for them or nothing to wait for.

        Args:
          found: of each group of layers, its first blocks as far as they are known. depths: numbers of those to read.
        """
        index, host, disk = self._index, self._host, self._disk
        assert disk is not None and host is not None
        now = self._clock()
        reading = {read.node.key: other for other in self._active.values() for read in other.reads}
        keys = [state.links[group][depth].key for group, wanted in enumerate(depths) for depth in wanted]
        others = [reading[key] for key in keys if key in reading]
        if others:  # another sequence has it read: wait with that one
            if max(other.deadline_s for other in others) > now:
                return True
            return False
        state.has_read = True
        # What is there must not make room for the rest.
        pins = [node.at[HOST] for nodes in found for node in nodes if node.at[HOST] >= 0]
        host.pool.share(np.array(pins, np.int32))
        if host.num_available < len(keys):
            host.release(np.array(pins, np.int32))
            return False
        reserved = self._active[state] = Reservation(now + self._timeout_s, [], pins)
        for group, wanted in enumerate(depths):
            parent = index.root(state.salt, group)
            for depth in range(max(wanted, default=-1) + 1):
                link = state.links[group][depth]
                node = index.child(parent, link.tokens, link.key)
                if node is None:
                    break
                if depth in wanted:
                    node.num_pins += 1  # first: what makes room may be all that keeps the node in the index
                    slot = host.take_slot()
                    assert slot is not None
                    facts = BlockFacts(link.key, parent.key, link.tokens, depth * index.block_size)
                    reserved.reads.append(Read(node, slot, disk.read(link.key, facts, host.data[slot])))
                parent = node
            index.drop_if_empty(parent)
        if not reserved.reads:  # the keys are taken by other content
            self.end(state)
        return bool(reserved.reads)

    def ready(self, state: KVState) -> bool:
        """Whether a sequence waits for no reads; takes in what has been read, and gives up what is late."""
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
        host = self._host
        assert host is not None
        if read.future.result() and read.node.at[HOST] < 0:
            host.put(read.node, read.slot)
            reserved.slots.append(read.slot)
            state.read.add(read.node)
        else:
            host.release(np.array([read.slot], np.int32))

    def _unpin(self, node: Node) -> None:
        node.num_pins -= 1
        self._index.drop_if_empty(node)

    def end(self, state: KVState) -> None:
        """Lets go of what a sequence has reserved: it runs, or it has ended."""
        reserved = self._active.pop(state, None)
        if reserved is None:
            return
        assert self._host is not None
        self._host.release(np.array(reserved.slots, np.int32))
        for read in reserved.reads:
            self._late.append(read)
            self._unpin(read.node)

    def poll(self) -> None:
        """Frees the slots of late reads that have come to an end."""
        for read in [r for r in self._late if r.future.done()]:
            self._late.remove(read)
            assert self._host is not None
            self._host.release(np.array([read.slot], np.int32))

    def wait(self, timeout_s: float = 0.01) -> None:
        """Blocks until a read is done, at most so long."""
        futures = [read.future for reserved in self._active.values() for read in reserved.reads]
        concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)

    def reserved(self, state: KVState) -> np.ndarray:
        """Slots of the host that a sequence has reserved."""
        reserved = self._active.get(state)
        return _NO_SLOTS if reserved is None else reserved.all_slots

    def all_reserved(self) -> Iterator[np.ndarray]:
        """Yields the slots of each sequence that has reserved some."""
        return (reserved.all_slots for reserved in self._active.values())

    @property
    def late(self) -> np.ndarray:
        """Slots of late reads, which belong to no sequence any more."""
        return np.array([read.slot for read in self._late], np.int32)

    def reading(self) -> list[int]:
        """Slots of the host that are being written to."""
        reads = [read for reserved in self._active.values() for read in reserved.reads] + self._late
        return [read.slot for read in reads]
