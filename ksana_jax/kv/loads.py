"""Reads from disk to the host on behalf of waiting sequences. Knows slots, files and a clock; no device.

A sequence's reads are reserved as a whole: it gets a slot of the host for each block or none at all, in which case it
computes what it could have read. So nobody holds some slots while it waits for more, and requests that each fit alone
cannot lock each other out. What was read stays pinned until its sequence runs or ends.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ksana_jax.kv.disk.tier import BlockFacts
from ksana_jax.kv.owner import Owner
from ksana_jax.kv.tier import HOST, Node
from ksana_jax.sequence import Sequence

if TYPE_CHECKING:
    from ksana_jax.kv.memory import KVMemory


@dataclasses.dataclass
class Read:
    """One block on its way from disk to a slot of the host."""

    node: Node
    slot: int
    future: concurrent.futures.Future[bool]


@dataclasses.dataclass
class Load:
    """What one waiting sequence has reserved. slots: pinned, those of reads that are done among them."""

    deadline_s: float
    reads: list[Read]
    slots: list[int]


class Loads:
    """Loads of all waiting sequences."""

    def __init__(self, memory: KVMemory, clock: Callable[[], float], timeout_s: float):
        self._memory, self._clock, self._timeout_s = memory, clock, timeout_s
        self._active: dict[Sequence, Load] = {}
        self._late: list[Read] = []  # nobody waits for them any more, and their slots are still written to

    @property
    def num_pending(self) -> int:
        """Blocks that waiting sequences still expect from disk."""
        return sum(len(load.reads) for load in self._active.values())

    @property
    def num_reading(self) -> int:
        """Those of them that the disk has not read yet."""
        return sum(not read.future.done() for load in self._active.values() for read in load.reads)

    def missing(self, seq: Sequence, found: list[Node], limit: int) -> list[int]:
        """Which blocks of a sequence are worth reading from disk, by number.

        Args:
          found: its first blocks, as far as they are known. limit: most blocks it can take over.
        """
        memory, disk = self._memory, self._memory.disk
        if disk is None or memory.host is None or not disk.enabled or seq.has_read:
            return []
        there = [node.is_somewhere or node.key in disk for node in found]
        for depth in range(len(found), limit):
            if memory.index.chain(seq.token_ids, seq.salt, seq.links, depth + 1)[depth].key not in disk:
                break
            there.append(True)
        count = memory.prefixes.usable(np.array(there, bool))
        starts = np.arange(count) * memory.block_size
        alive = ~memory.live.dead_blocks(starts, memory.block_size, count * memory.block_size)
        return [d for d in np.flatnonzero(alive).tolist() if d >= len(found) or not found[d].is_somewhere]

    def begin(self, seq: Sequence, found: list[Node], depths: list[int]) -> bool:
        """Starts to read some blocks of a sequence; False if there is no room for them or nothing to wait for."""
        memory, disk = self._memory, self._memory.disk
        assert disk is not None and memory.host is not None and memory.host_data is not None
        now = self._clock()
        reading = {read.node.key: load for load in self._active.values() for read in load.reads}
        others = [reading[seq.links[d].key] for d in depths if seq.links[d].key in reading]
        if others:  # another sequence has it read: wait with that one
            if max(load.deadline_s for load in others) > now:
                return True
            return False
        seq.has_read = True
        # What is there must not make room for the rest.
        pins = [node.at[HOST] for node in found if node.at[HOST] >= 0]
        memory.host.pool.share(np.array(pins, np.int32))
        if memory.host.num_available < len(depths):
            memory.host.release(np.array(pins, np.int32))
            return False
        load = Load(now + self._timeout_s, [], pins)
        self._active[seq] = load
        parent = memory.index.root(seq.salt)
        wanted = set(depths)
        for depth in range(depths[-1] + 1):
            link = seq.links[depth]
            node = memory.index.child(parent, link.tokens, link.key)
            if node is None:
                break
            if depth in wanted:
                node.num_pins += 1  # first: what makes room may be all that keeps the node in the index
                slot = memory.take_slot()
                assert slot is not None
                facts = BlockFacts(link.key, parent.key, link.tokens, depth * memory.block_size)
                load.reads.append(Read(node, slot, disk.read(link.key, facts, memory.host_data[slot])))
            parent = node
        memory.index.drop_if_empty(parent)
        if not load.reads:  # the keys are taken by other content
            self.end(seq)
        return bool(load.reads)

    def ready(self, seq: Sequence) -> bool:
        """Whether a sequence waits for no reads; takes in what has been read, and gives up what is late."""
        load = self._active.get(seq)
        if load is None or not load.reads:
            return True
        if not all(read.future.done() for read in load.reads):
            if self._clock() < load.deadline_s:
                return False
        for read in load.reads:
            if read.future.done():
                self._take_in(seq, load, read)
            else:
                self._late.append(read)
            self._unpin(read.node)
        load.reads = []
        return True

    def _take_in(self, seq: Sequence, load: Load, read: Read) -> None:
        host = self._memory.host
        assert host is not None
        if read.future.result() and read.node.at[HOST] < 0:
            host.put(read.node, read.slot)
            load.slots.append(read.slot)
            seq.read.add(read.node)
        else:
            host.release(np.array([read.slot], np.int32))

    def _unpin(self, node: Node) -> None:
        node.num_pins -= 1
        self._memory.index.drop_if_empty(node)

    def end(self, seq: Sequence) -> None:
        """Lets go of what a sequence has reserved: it runs, or it has ended."""
        load = self._active.pop(seq, None)
        if load is None:
            return
        assert self._memory.host is not None
        self._memory.host.release(np.array(load.slots, np.int32))
        for read in load.reads:
            self._late.append(read)
            self._unpin(read.node)

    def poll(self) -> None:
        """Frees the slots of late reads that have come to an end."""
        for read in [r for r in self._late if r.future.done()]:
            self._late.remove(read)
            assert self._memory.host is not None
            self._memory.host.release(np.array([read.slot], np.int32))

    def wait(self, timeout_s: float = 0.01) -> None:
        """Blocks until a read is done, at most so long."""
        futures = [read.future for load in self._active.values() for read in load.reads]
        concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)

    def owners(self) -> Iterator[Owner]:
        """Loads as owners of slots of the host."""
        for seq, load in self._active.items():
            slots = np.array(load.slots + [read.slot for read in load.reads], np.int32)
            yield Owner(seq.request_id, seq.index, "reads", HOST, slots)
        yield Owner("", 0, "reads", HOST, np.array([read.slot for read in self._late], np.int32))

    def reading(self) -> list[int]:
        """Slots of the host that are being written to."""
        return [read.slot for load in self._active.values() for read in load.reads] + [r.slot for r in self._late]
