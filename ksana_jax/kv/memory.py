"""Where every KV block lives: device, host or disk. Knows blocks, tokens and counts; no jax, no scheduling.

The scheduler asks for blocks and gives them back; which cached prefix makes room for them, what moves to the host and
from there to disk, and what a prompt can take over is decided here. Nothing is copied here: copies between device and
host are noted as `step.Moves`, which the executor makes before it computes, so that within a step

    a block that is freed may be taken at once: it is saved before it is overwritten, and
    a block that is loaded or copied may be shared at once: it is there before it is read.

After the step `commit` says that they have been made. A host slot is pinned while a move that touches it is pending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ksana_jax.kv.block_manager import BlockManager, NoFreeBlocks
from ksana_jax.kv.costs import Costs
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.disk.tier import BlockFacts, DiskTier
from ksana_jax.kv.loads import Loads
from ksana_jax.kv.owner import Owner
from ksana_jax.kv.prefix_cache import PrefixCache
from ksana_jax.kv.prefix_index import PrefixIndex, Scope, sha256
from ksana_jax.kv.replacement import Policy, find_policy
from ksana_jax.kv.tier import DEVICE, HOST, Node, Tier
from ksana_jax.patterns import FULL, LiveRange
from ksana_jax.step.contract import Moves

# Blocks that `flush` moves and writes before it waits for the disk.
FLUSHED_AT_ONCE = 64
_NO_PAIRS = np.zeros((0, 2), np.int32)


class KVMemory:
    """Owns the device's pool, the host's slots and the disk's files.

    Args:
      num_blocks, block_size: of the device's pool.
      caching: whether full blocks are kept after use.
      eviction: a key of `replacement.POLICIES`, or see `replacement.find_policy`.
      preempt: see `config.EngineConfig`.
      host_data: [slots, ...] the host's blocks, preallocated, each as many bytes; None has no host tier.
      disk: None has no disk tier.
      block_bytes: of one block, for reports; 0 where that is not known.
      write: see `config.EngineConfig.cache_write`.
      scope: what keys depend on.
      digest: see `PrefixIndex`. cost: see `PrefixIndex`.
      clock: seconds, rising. load_timeout_s: after which a request no longer waits for the disk.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = False,
        eviction: str | Policy = "lru",
        preempt: str = "auto",
        host_data: np.ndarray | None = None,
        disk: DiskTier | None = None,
        block_bytes: int = 0,
        write: str = "back",
        scope: Scope | None = None,
        digest: Callable[[bytes], bytes] = sha256,
        cost: Callable[[int], float] = lambda position: 1.0,
        clock: Callable[[], float] = time.perf_counter,
        load_timeout_s: float = 1.0,
    ):
        self.preempt, self.write = preempt, write
        self.block_size, self.block_bytes = block_size, block_bytes
        self.disk = disk
        self._num_blocks, self._replacement, self._caching = num_blocks, find_policy(eviction), caching
        self._digest, self._cost, self._clock, self._load_timeout_s = digest, cost, clock, load_timeout_s
        self._make_books(host_data, scope or Scope())
        self.counters = Counters()
        self.num_blocks_by_origin: dict[str, int] = {}  # that rows have come by, see `Sequence`
        self.live = LiveRange.of([FULL])
        self.costs = Costs()

    def _make_books(self, host_data: np.ndarray | None, scope: Scope) -> None:
        size = self.block_size
        self.device = Tier(DEVICE, self._num_blocks, size, self._replacement)
        self.host: Tier | None = None
        if host_data is not None and len(host_data):
            self.host = Tier(HOST, len(host_data), size, self._replacement)
        self.host_data = host_data
        self.index = PrefixIndex(size, scope, self._digest, self._cost)
        self.prefixes = PrefixCache(self, self._caching)
        self.loads = Loads(self, self._clock, self._load_timeout_s)
        self._saves: dict[int, int] = {}  # host slot -> device block
        self._copies: dict[int, int] = {}  # to -> from
        self._loads: dict[int, int] = {}  # device block -> host slot
        self._pins: list[int] = []  # host slots of pending moves
        self._through: list[Node] = []  # to be written to disk once they are on the host

    def reset(self, host_data: np.ndarray | None) -> None:
        """Forgets what device and host hold, after a failure that may have left the books half written.

        Args:
          host_data: new blocks of the host: reads from disk that are under way still write to the old ones.
        """
        if self.disk is not None:
            self.disk.reset()
        self._make_books(host_data, self.index.scope)

    @property
    def blocks(self) -> BlockManager:
        """The device's pool."""
        return self.device.pool

    @property
    def _host(self) -> Tier:
        assert self.host is not None
        return self.host

    @property
    def num_available(self) -> int:
        """Blocks of the device that can be had at once: free ones, and cached ones that nobody uses."""
        return self.device.num_available

    def set_patterns(self, live: LiveRange, scope: Scope) -> None:
        """Changes what stays visible and what keys depend on. Only while nothing runs or waits."""
        self.live = live
        self.index.scope = scope
        for tier in (self.device, self.host):
            if tier is not None:
                tier.set_leaves_first(live.window is None)

    # ------------------------------------------------------------------ blocks of the device

    def allocate(self, count: int) -> np.ndarray:
        """Takes `count` blocks of the device, evicting cached prefixes where none is free: ids [count].

        Raises:
          NoFreeBlocks: fewer are available; nothing is taken.
        """
        pool = self.device.pool
        if count > self.device.num_available:
            raise NoFreeBlocks(
                f"{count} blocks asked for, {self.device.num_available} of {pool.num_blocks} are to be had"
            )
        while pool.num_free < count:
            self._evict_from_device()
        return pool.allocate(count)

    def share(self, ids: np.ndarray) -> None:
        """Adds an owner to each of some blocks of the device."""
        self.device.pool.share(ids)

    def release(self, ids: np.ndarray) -> None:
        """Takes one owner from each of some blocks of the device."""
        self.device.release(ids)
        if self._copies or self._loads:
            for block in ids[self.device.pool.ref_count[ids] == 0].tolist():
                self._copies.pop(block, None)  # whoever wanted the copy has gone
                if not self.device.pool.kept[block]:
                    self._loads.pop(block, None)

    def is_shared(self, block: int) -> bool:
        """Whether a block must be copied before one of its owners writes to it."""
        return bool(self.device.pool.ref_count[block] > 1 or self.device.pool.kept[block])

    def copy(self, block: int) -> int:
        """A copy of a shared block, for one of its owners, who gives the shared one back: its id."""
        (new,) = self.allocate(1).tolist()
        self._copies[new] = self._copies.get(block, block)
        self.counters.copied += 1
        self.release(np.array([block], np.int32))
        return new

    # ------------------------------------------------------------------ cached content

    def pin(self, nodes: list[Node]) -> None:
        """Adds an owner to the best place of each of some nodes."""
        on_device, on_host = _places(nodes)
        self.share(on_device)
        if len(on_host):
            self._host.pool.share(on_host)

    def unpin(self, nodes: list[Node]) -> None:
        """Takes that owner away again; the nodes have not moved in between."""
        on_device, on_host = _places(nodes)
        self.release(on_device)
        if len(on_host):
            self._host.release(on_host)

    def load(self, nodes: list[Node], count: int) -> None:
        """Gives those of some pinned nodes that are not on the device, `count` of them, a block there."""
        new = self.allocate(count).tolist()
        for node in nodes:
            if node.at[DEVICE] < 0:
                block = new.pop()
                self._loads[block] = node.at[HOST]
                self._pins.append(node.at[HOST])
                self.device.put(node, block)

    # ------------------------------------------------------------------ eviction

    def _evict_from_device(self) -> None:
        node = self.device.victim()
        assert node is not None, "idle blocks, and none of them can be evicted"
        if self.write != "drop":
            self.save(node)
        self.counters.evicted += 1
        self._loads.pop(node.at[DEVICE], None)
        self.device.drop(node)
        self.index.drop_if_empty(node)

    def save(self, node: Node) -> None:
        """Moves a node's content to the host too, if it is not there and there is room."""
        if self.host is None or node.at[HOST] >= 0:
            return
        slot = self.take_slot()
        if slot is None:
            return
        self._note_save(node.at[DEVICE], slot)
        self._pins.append(slot)
        self.host.put(node, slot)
        if self.write == "through" and self.disk is not None:
            self._through.append(node)

    def _note_save(self, block: int, slot: int) -> None:
        # A block that is itself still to be written is read where its content comes from.
        self._saves[slot] = self._copies.get(block, block)
        self.counters.saved += 1

    def take_slot(self) -> int | None:
        """A slot of the host with one owner, evicting cached content where none is free; None where all are owned."""
        host = self.host
        if host is None or not host.num_available:
            return None
        if not host.pool.num_free:
            node = host.victim()
            assert node is not None, "idle slots, and none of them can be evicted"
            if self.write != "drop" and node.at[DEVICE] < 0:
                self._write_to_disk(node)
            self.counters.evicted_host += 1
            host.drop(node)
            self.index.drop_if_empty(node)
        return int(host.pool.allocate(1)[0])

    def _write_to_disk(self, node: Node) -> None:
        if self.disk is not None and self.host_data is not None and node.key not in self.disk:
            self.disk.write(self.facts(node), self.host_data[node.at[HOST]])

    def facts(self, node: Node) -> BlockFacts:
        """A node as the disk knows it."""
        assert node.parent is not None
        return BlockFacts(node.key, node.parent.key, node.tokens, node.depth * self.block_size)

    # ------------------------------------------------------------------ preempted rows

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a row that makes room should move its blocks to the host rather than compute them again."""
        if self.host is None or self.preempt == "recompute" or num_blocks > self.host.num_available:
            return False
        return self.preempt == "swap" or self.costs.favour_moving(2 * num_blocks, num_tokens)

    def swap_out(self, ids: np.ndarray) -> np.ndarray:
        """Slots of the host [n] that will hold the content of blocks [n]; there is room."""
        slots = []
        for block in ids.tolist():
            slot = self.take_slot()
            assert slot is not None
            self._note_save(block, slot)
            slots.append(slot)
        self.counters.swapped_out += len(slots)
        return np.array(slots, np.int32)

    def swap_in(self, slots: np.ndarray) -> np.ndarray:
        """Blocks of the device [n] that will hold the content of slots [n], which are given back; there is room."""
        ids = self.allocate(len(slots))
        self._loads.update(zip(ids.tolist(), slots.tolist(), strict=True))
        self._pins += slots.tolist()
        self.counters.swapped_in += len(slots)
        return ids

    def drop_swapped(self, slots: np.ndarray) -> None:
        """Gives the slots of a swapped row back, unread."""
        assert self.host is not None
        for slot in slots.tolist():
            self._saves.pop(slot, None)
        self.host.release(slots)

    @property
    def weighs_costs(self) -> bool:
        """Whether `costs` are asked for."""
        return self.preempt == "auto" and self.host is not None

    # ------------------------------------------------------------------ around a step

    def take_moves(self) -> Moves | None:
        """What the executor must copy before it computes; None for nothing."""
        if not (self._saves or self._copies or self._loads):
            return None
        self.counters.loaded += len(self._loads)
        moves = Moves(
            _pairs((block, slot) for slot, block in self._saves.items()),
            _pairs((old, new) for new, old in self._copies.items()),
            _pairs((slot, block) for block, slot in self._loads.items()),
        )
        self._saves, self._copies, self._loads = {}, {}, {}
        return moves

    def commit(self) -> None:
        """Says that the moves taken have been made."""
        if self._through:
            for node in self._through:
                if node.at[HOST] >= 0:
                    self._write_to_disk(node)
            self._through = []
        if self._pins:
            assert self.host is not None
            pins, self._pins = np.array(self._pins, np.int32), []
            self.host.release(pins)

    def flush(self) -> Iterator[None]:
        """Brings cached content to the disk, some blocks at a time, the deepest first.

        Nothing runs and no move is left; after each yield the caller makes those that have come up.
        """
        if self.disk is None or self.host is None or self.write == "drop":
            return
        nodes = {*self.host.node_of.values(), *self.device.node_of.values()}
        nodes = [node for node in nodes if node.key not in self.disk]
        nodes.sort(key=lambda node: (-node.depth, node.key))
        at_once = min(FLUSHED_AT_ONCE, self.host.num_available)
        for start in range(0, len(nodes), at_once):
            for node in nodes[start : start + at_once]:
                if node.at[HOST] >= 0:
                    self._write_to_disk(node)
                elif node.is_somewhere:
                    self.save(node)
                    self._through.append(node)
            yield
            self.disk.flush()

    # ------------------------------------------------------------------ who owns what

    def owners(self) -> Iterator[Owner]:
        """Yields moves and reads, as owners of slots of the host."""
        if self.host is None:
            return
        yield Owner("", 0, "moves", HOST, np.array(self._pins, np.int32))
        yield from self.loads.owners()

    def moving(self, level: int) -> set[int]:
        """Blocks of a tier whose content is still to come."""
        return {*self._copies, *self._loads} if level == DEVICE else {*self._saves, *self.loads.reading()}

    def check(self, owned: Iterable[np.ndarray], swapped: Iterable[np.ndarray] = ()) -> None:
        """Holds the books against what sequences say they hold.

        Args:
          owned: one array of device blocks per owner. swapped: one array of host slots per owner.

        Raises:
          AssertionError: see `BlockManager.check`, `Tier.check` and `PrefixIndex.check`.
        """
        self.device.pool.check(owned)
        self.device.check()
        self.index.check()
        if self.host is not None:
            self.host.pool.check([*(owner.ids for owner in self.owners()), *swapped])
            self.host.check()


def _places(nodes: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of the device that have some nodes' content, and slots of the host that have the others'."""
    on_device = [node.at[DEVICE] for node in nodes if node.at[DEVICE] >= 0]
    on_host = [node.at[HOST] for node in nodes if node.at[DEVICE] < 0]
    return np.array(on_device, np.int32), np.array(on_host, np.int32)


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    found = list(pairs)
    return np.array(found, np.int32) if found else _NO_PAIRS
