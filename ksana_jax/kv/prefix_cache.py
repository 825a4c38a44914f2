"""The prefix cache: finds cached blocks for a prompt, and caches new ones. Knows tokens, no requests; no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ksana_jax.core.patterns import FAR, FULL
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.disk_reads import DiskReads
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.prefix_index import Link, PrefixIndex
from ksana_jax.kv.snapshots import Snapshots
from ksana_jax.kv.state import HeldBlocks, KVState, Origin
from ksana_jax.kv.state_layout import LIVE
from ksana_jax.kv.state_slots import StateSlots
from ksana_jax.kv.tier import DEVICE, HOST, Node
from ksana_jax.kv.visible_range import VisibleRange


@dataclasses.dataclass
class Hit:
    """The pinned nodes that a prompt found, at sequence positions `starts`; they cover its first num_tokens tokens.

    last: for each group of layers, the node of the last tokens, whether or not it is needed.
    awaits: a running row is computing the next block, or it is being read from disk: try again later.
    num_evicted: number of evicted tokens, [Gk] or 0. snapshot: True if a snapshot has these nodes.
    max_tokens: maximum of num_tokens, unless a snapshot has more.
    state: snapshot of the recurrent layers after those tokens; None without such layers, or without a hit.
    num_keys, num_states: leading tokens whose keys and values are cached, and tokens up to the last cached state.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    last: list[Node] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_loads: int = 0
    awaits: bool = False
    num_evicted: np.ndarray | int = 0
    snapshot: bool = False
    max_tokens: int = 0
    state: Node | None = None
    num_keys: int = 0
    num_states: int = 0

    def allocated_until(self, block_size: int) -> int:
        """Sequence position of the token that will need new blocks."""
        return self.num_tokens + int(np.max((self.num_evicted - self.num_tokens) % block_size))


class PrefixCache:
    """Finds, pins and caches full blocks by their content.

    Args:
      enabled: True if full blocks are kept after use.
      index: knows the cached content. device, host: tiers that store it. disk_reads: bring more of it to the
        host; None without a disk.

    Attributes:
      visible: positions that stay visible to later tokens, for each group of layers with blocks, and last for the
        recurrent layers, if any.
      snapshots: of rows that evict tokens; None if none do.
      reporter: the `PrefixReporter` that explains hits; None without one.
    """

    def __init__(
        self,
        enabled: bool,
        index: PrefixIndex,
        device: DeviceTier,
        host: HostTier | None,
        disk_reads: DiskReads | None,
        counters: Counters,
    ):
        self.enabled, self.visible = enabled, [VisibleRange.of([FULL])]
        self._index, self._device, self._host = index, device, host
        self._disk_reads, self._counters = disk_reads, counters
        self._computing: dict[bytes, KVState] = {}
        self.snapshots: Snapshots | None = None
        self.reporter: Any = None
        self._states: StateSlots | None = None

    def set_layout(self, layout: KVLayout, states: StateSlots | None = None) -> None:
        """Changes the visible positions and the evictions. Only while nothing runs or waits.

        Args:
          states: slots of recurrent layers; None without any.
        """
        self.visible, self._states = [group.live for group in layout.groups], states
        if self._disk_reads is not None:
            self._disk_reads.states = states
        if states is not None:
            self.visible.append(LIVE)
        schedule = layout.eviction if self.enabled else None
        if schedule is None or schedule.method.needs_full_text:
            self.snapshots = None
        else:
            self.snapshots = self.snapshots or Snapshots(self._index, self._device)
            self.snapshots.set_schedule(schedule)

    def pin(self, state: KVState, token_ids: np.ndarray, max_tokens: int) -> Hit:
        """Finds the longest cached prefix of a sequence, of at most max_tokens tokens, and pins it.

        In layers whose pattern is bounded, only the blocks that later queries attend to are needed and pinned.
        """
        hit, size = Hit(max_tokens=max_tokens), self._index.block_size
        limit = max_tokens // size
        if not limit:
            return hit
        found = self._known(state, token_ids, limit)
        on_disk = self._missing(state, token_ids, found, limit)
        if self._disk_reads is not None and any(on_disk) and self._disk_reads.begin(state, found, on_disk):
            hit.awaits = True
            return hit
        num_blocks = self._usable_of(found)
        if self._states is not None:
            links = self._index.chain(token_ids, state.salt, state.links[0], limit)[num_blocks:limit]
            hit.awaits = any(self._computing.get(key, state) is not state for key, _ in links)
            if hit.awaits:
                return hit
            self._pin_state(hit, found, num_blocks)
            found = found[:-1]
        elif num_blocks < limit:
            key = self.link(state, token_ids, 0, num_blocks).key
            if self._computing.get(key, state) is not state:
                hit.awaits = True
                return hit
        if not num_blocks:
            return hit
        for nodes, live in zip(found, self.visible, strict=self._states is None):
            needed = self.needed(live, num_blocks)
            hit.starts += [size * depth for depth in needed]
            hit.nodes += [nodes[depth] for depth in needed]
            hit.last += nodes[num_blocks - 1 : num_blocks] if num_blocks else []
        hit.num_tokens = num_blocks * size
        self.pin_found(hit)
        return hit

    def _pin_state(self, hit: Hit, found: list[list[Node]], num_blocks: int) -> None:
        """Pins the state after the blocks of a hit, and records how far keys and states reach without each other."""
        assert self._states is not None
        *keys, states = found
        size, stored = self._index.block_size, [[node.is_stored for node in nodes] for nodes in keys]
        hit.num_keys = size * self.usable([np.array(have, bool) for have in stored], self.visible[:-1])
        hit.num_states = size * max((node.depth + 1 for node in states if node.is_stored), default=0)
        if num_blocks:
            hit.state = states[num_blocks - 1]
            self._states.pin(hit.state)

    def pin_found(self, hit: Hit) -> None:
        """Pins the nodes of a hit where they are, and counts those to load."""
        hit.num_loads = sum(node.at[DEVICE] < 0 for node in hit.nodes)
        on_device, on_host = _places(hit.nodes)
        self._device.pool.share(on_device)
        if self._host is not None:
            self._host.pool.share(on_host)

    def link(self, state: KVState, token_ids: np.ndarray, group: int, depth: int) -> Link:
        """Returns the link of a sequence's block number `depth` in one group."""
        return self._index.chain(token_ids, state.salt, state.links[group], depth + 1, group)[depth]

    def needed(self, live: VisibleRange, num_blocks: int) -> list[int]:
        """Returns the indices of those first blocks of a sequence that later queries attend to."""
        size = self._index.block_size
        if live.window is None:
            return list(range(num_blocks))
        dead = live.dead_blocks(np.arange(num_blocks) * size, size, num_blocks * size)
        return np.flatnonzero(~dead).tolist()

    def _known(self, state: KVState, token_ids: np.ndarray, limit: int) -> list[list[Node]]:
        """Returns the indexed leading blocks of a sequence, at most `limit`, for each group of layers."""
        return [self._known_of(state, token_ids, group, limit) for group in range(len(self.visible))]

    def _known_of(self, state: KVState, token_ids: np.ndarray, group: int, limit: int) -> list[Node]:
        found: list[Node] = []
        parent, links = self._index.root(state.salt, group), state.links[group]
        while len(found) < limit:
            if len(found) == len(links):  # hash as many blocks again: those after the first unknown one can wait
                self._index.chain(token_ids, state.salt, links, min(2 * len(links) + 1, limit), group)
            for key, tokens in links[len(found) : limit]:
                node = self._index.find(key, parent, tokens)
                if node is None:
                    return found
                found.append(node)
                parent = node
        return found

    def _missing(self, state: KVState, token_ids: np.ndarray, found: list[list[Node]], limit: int) -> list[list[int]]:
        """Returns the indices of a sequence's blocks that are worth reading from disk, for each group of layers.

        Args:
          found: the indexed leading blocks of each group. limit: maximum number of blocks that it can reuse.
        """
        reads = self._disk_reads
        if reads is None or not reads.enabled or state.has_read:
            return []
        there = []
        for group, nodes in enumerate(found):
            have = [node.is_stored or reads.has(node.key, group) for node in nodes]
            while len(have) < limit and reads.has(self.link(state, token_ids, group, len(have)).key, group):
                have.append(True)
            there.append(np.array(have, bool))
        count = self.usable(there)
        return [
            [d for d in self.needed(live, count) if d >= len(nodes) or not nodes[d].is_stored]
            for nodes, live in zip(found, self.visible, strict=True)
        ]

    def num_cached_tokens(self, state: KVState, token_ids: np.ndarray) -> int:
        """Number of leading tokens of a prompt that could be reused now; pins nothing and reads nothing from disk."""
        if not self.enabled:
            return 0
        found = self._known(state, token_ids, (len(token_ids) - 1) // self._index.block_size)
        return self._usable_of(found) * self._index.block_size

    def usable(self, there: Sequence[np.ndarray], visible: Sequence[VisibleRange] | None = None) -> int:
        """Length in blocks of the longest prefix for which every group has the blocks that later queries attend to.

        Args:
          there: [blocks] bool for each group of layers, whether the block is available.
          visible: positions that stay visible in each of them; None takes those of all groups.
        """
        count, visible = min(map(len, there)), visible or self.visible
        while True:
            of_each = [self._usable(live, have[:count]) for live, have in zip(visible, there, strict=True)]
            if min(of_each) == count:
                return count
            count = min(of_each)

    def _usable_of(self, found: list[list[Node]]) -> int:
        if not all(found):
            return 0
        return self.usable([np.array([node.is_stored for node in nodes], bool) for nodes in found])

    def _usable(self, live: VisibleRange, there: np.ndarray) -> int:
        """Length in blocks of the longest prefix for which one group has the blocks that later queries attend to."""
        size = self._index.block_size
        if live.window is None:
            return len(there) if there.all() else int(there.argmin())
        starts = np.arange(len(there)) * size
        for count in range(len(there), 0, -1):
            if there[count - 1]:
                alive = ~live.dead_blocks(starts[:count], size, count * size)
                if there[:count][alive].all():
                    return count
        return 0

    def unpin(self, hit: Hit) -> None:
        """Unpins a hit without room for it; its nodes have not moved since."""
        on_device, on_host = _places(hit.nodes)
        self._device.release(on_device)
        if self._host is not None:
            self._host.release(on_host)
        if hit.state is not None:
            assert self._states is not None
            self._states.unpin(hit.state)

    def claim(self, state: KVState, hit: Hit, token_ids: np.ndarray) -> HeldBlocks:
        """Turns a pinned hit into device blocks, loading those on the host; the caller has made sure of room for them.

        Args:
          token_ids: of the sequence, for the hit rate and the report.
        """
        origins = [
            Origin.HIT_DEVICE if node.at[DEVICE] >= 0 else Origin.HIT_DISK if node in state.read else Origin.HIT_HOST
            for node in hit.nodes
        ]
        if state.num_cached_tokens is None:
            state.num_cached_tokens = hit.num_tokens
            if self._states is not None:
                state.reach = hit.num_keys, hit.num_states
            self._count(len(token_ids), hit, origins)
            if self.reporter is not None:
                state.prefix_report = self.reporter.explain(state, token_ids, hit, origins)
        if hit.num_loads:
            self._device.load(hit.nodes, hit.num_loads)
        now = self._index.tick()
        for node in hit.nodes:
            node.last_use, node.num_uses = now, node.num_uses + 1
            if self._host is not None:
                self._host.touch(node)
            for listener in self._device.listeners:
                listener.used(node)
        if hit.last:
            state.nodes = dict(enumerate(hit.last))
            state.num_indexed = hit.num_tokens // self._index.block_size
        ids = np.array([node.at[DEVICE] for node in hit.nodes], np.int32)
        groups = np.array([node.group for node in hit.nodes], np.intp)
        starts, by_origin = np.array(hit.starts, np.int32), np.array(origins, np.uint8)
        slot = FAR if hit.state is None or self._states is None else self._states.claim(hit.state)
        return HeldBlocks(ids, starts, groups, hit.num_tokens, by_origin, hit.num_evicted, slot)

    def _count(self, num_tokens: int, hit: Hit, origins: list[Origin]) -> None:
        c = self._counters
        c.queried_tokens += num_tokens
        c.hit_tokens += hit.num_tokens
        c.key_tokens += max(hit.num_tokens, hit.num_keys)
        c.state_tokens += hit.num_states
        c.hits_device += origins.count(Origin.HIT_DEVICE)
        c.hits_host += origins.count(Origin.HIT_HOST)
        c.hits_disk += origins.count(Origin.HIT_DISK)

    def expect(self, state: KVState, token_ids: np.ndarray) -> None:
        """Records that a starting sequence will compute all its full blocks, so that others can wait for them."""
        if self._states is None:
            state.num_expected = len(token_ids) // self._index.block_size
            self._expect_next(state, token_ids)

    def expect_state(self, state: KVState, token_ids: np.ndarray, num_blocks: int) -> None:
        """Records that a sequence will cache its state after some blocks, so that others can wait for it."""
        self.expect_no_more(state)
        key = self.link(state, token_ids, 0, num_blocks - 1).key
        if self._computing.setdefault(key, state) is state:
            state.expects = key

    def _expect_next(self, state: KVState, token_ids: np.ndarray) -> None:
        """Records the first expected block that is not indexed yet: a sequence with the same tokens finds those before
        it, and then looks for this one."""
        num_expected = state.num_expected
        self.expect_no_more(state)
        if state.num_indexed < num_expected:
            state.num_expected = num_expected
            key = self.link(state, token_ids, 0, state.num_indexed).key
            if self._computing.setdefault(key, state) is state:
                state.expects = key

    def expect_no_more(self, state: KVState) -> None:
        """Forgets the blocks that a sequence was expected to compute."""
        state.num_expected = 0
        if state.expects is not None:
            del self._computing[state.expects]
            state.expects = None

    def insert(self, state: KVState, token_ids: np.ndarray, ids: Sequence[list[int]]) -> list[list[int]]:
        """Adds the next full blocks of a running sequence to the cache.

        Args:
          token_ids: the sequence's tokens so far.
          ids: for each group of layers, its device blocks from block number state.num_indexed on; -1 for a block that
            it no longer holds.

        Returns:
          The blocks that it should hold. If another block already has the same content, that block, now shared; the
          caller releases its own.
        """
        size, first, count = self._index.block_size, state.num_indexed, len(ids[0])
        data = np.asarray(token_ids[first * size : (first + count) * size], np.int32).tobytes()
        kept = [self._insert(state, data, group, of_group) for group, of_group in enumerate(ids)]
        if state.cacheable:
            state.num_indexed = first + count
            if state.num_expected:
                self._expect_next(state, token_ids)
        else:
            state.num_indexed = 0
            state.nodes.clear()
            self.expect_no_more(state)
        return kept

    def _insert(self, state: KVState, data: bytes, group: int, ids: list[int]) -> list[int]:
        """Adds blocks of one group; see `insert`. data: their tokens as bytes."""
        index, links, depth = self._index, state.links[group], state.num_indexed
        now, length, kept = index.tick(), 4 * index.block_size, list(ids)
        parent = state.nodes.get(group) or index.root(state.salt, group)
        if not parent.known and (parent := index.current(parent)) is None:
            state.cacheable = False
            return kept
        for at, block in enumerate(ids):
            if depth + at == len(links):
                links.append(index.link(parent.key, data[at * length : (at + 1) * length], depth + at))
            key, tokens = links[depth + at]
            node = index.child(parent, tokens, key)
            if node is None:  # other content has the same key: later blocks of this sequence cannot be found
                state.cacheable = False
                break
            parent = node
            if block < 0:
                continue
            if node.at[DEVICE] < 0:
                if not node.is_stored:
                    node.inserted = node.last_use = now
                self._device.keep(node, block)
            elif node.at[DEVICE] != block:
                kept[at] = node.at[DEVICE]
                self._device.pool.share(np.array([kept[at]], np.int32))
        state.nodes[group] = parent
        if not parent.is_stored:
            index.drop_if_empty(parent)
        return kept


def _places(nodes: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the device blocks of nodes that are on the device, and the host slots of the other nodes."""
    on_device = [node.at[DEVICE] for node in nodes if node.at[DEVICE] >= 0]
    on_host = [node.at[HOST] for node in nodes if node.at[DEVICE] < 0]
    return np.array(on_device, np.int32), np.array(on_host, np.int32)
