"""What a prompt can take over from the cache, and what enters it. Knows tokens and nodes, no requests; no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.disk_reads import DiskReads
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.prefix_index import Link, PrefixIndex
from ksana_jax.kv.state import HeldBlocks, KVState, Origin
from ksana_jax.kv.tier import DEVICE, HOST, Node
from ksana_jax.patterns import FULL, LiveRange


@dataclasses.dataclass
class Hit:
    """What a prompt found, pinned: nodes at text positions `starts`, the first num_tokens tokens in all.

    last: of each group of layers the node of the last tokens, whether it is needed or not.
    awaits: its next block is just being computed by a running row, or read from disk: better come back.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    last: list[Node] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_loads: int = 0
    awaits: bool = False


class PrefixCache:
    """Cached prefixes: full blocks by what they hold.

    Args:
      enabled: whether full blocks are kept after use.
      index: which content there is. device, host: where it is stored. disk_reads: bring more of it to the host.

    Attributes:
      lives: which positions stay visible to later tokens, in each group of layers.
    """

    def __init__(
        self,
        enabled: bool,
        index: PrefixIndex,
        device: DeviceTier,
        host: HostTier | None,
        disk_reads: DiskReads,
        counters: Counters,
    ):
        self.enabled, self.lives = enabled, [LiveRange.of([FULL])]
        self._index, self._device, self._host = index, device, host
        self._disk_reads, self._counters = disk_reads, counters
        self._computing: dict[bytes, KVState] = {}

    def pin(self, state: KVState, token_ids: np.ndarray, max_tokens: int) -> Hit:
        """Finds the longest cached beginning of a sequence, of at most max_tokens tokens, and pins it.

        In layers whose pattern is bounded, only the blocks that later queries see are needed and pinned.
        """
        hit, size = Hit(), self._index.block_size
        limit = max_tokens // size
        if not self.enabled or not limit:
            return hit
        found = self._known(state, token_ids, limit)
        on_disk = self._missing(state, token_ids, found, limit)
        if any(on_disk) and self._disk_reads.begin(state, found, on_disk):
            hit.awaits = True
            return hit
        num_blocks = self._usable_of(found)
        if num_blocks < limit:
            key = self._link(state, token_ids, 0, num_blocks).key
            if self._computing.get(key, state) is not state:
                hit.awaits = True
                return hit
        for nodes, live in zip(found, self.lives, strict=True):
            needed = self._needed(live, num_blocks)
            hit.starts += [size * depth for depth in needed]
            hit.nodes += [nodes[depth] for depth in needed]
            hit.last += nodes[num_blocks - 1 : num_blocks] if num_blocks else []
        hit.num_tokens = num_blocks * size
        hit.num_loads = sum(node.at[DEVICE] < 0 for node in hit.nodes)
        on_device, on_host = _places(hit.nodes)
        self._device.share(on_device)
        if self._host is not None:
            self._host.pool.share(on_host)
        return hit

    def _links(self, state: KVState, token_ids: np.ndarray, group: int, num_blocks: int) -> list[Link]:
        """The links of a sequence's first blocks of a group, num_blocks or more."""
        return self._index.chain(token_ids, state.salt, state.links[group], num_blocks, group)

    def _link(self, state: KVState, token_ids: np.ndarray, group: int, depth: int) -> Link:
        """The link of a sequence's block of a number."""
        return self._links(state, token_ids, group, depth + 1)[depth]

    def _needed(self, live: LiveRange, num_blocks: int) -> list[int]:
        """Which of the first blocks of a text later queries see, by number."""
        size = self._index.block_size
        dead = live.dead_blocks(np.arange(num_blocks) * size, size, num_blocks * size)
        return np.flatnonzero(~dead).tolist()

    def _known(self, state: KVState, token_ids: np.ndarray, limit: int) -> list[list[Node]]:
        """The first blocks of a sequence as far as the index has them, at most `limit`, of each group of layers."""
        return [self._known_of(state, token_ids, group, limit) for group in range(len(self.lives))]

    def _known_of(self, state: KVState, token_ids: np.ndarray, group: int, limit: int) -> list[Node]:
        found: list[Node] = []
        parent = self._index.root(state.salt, group)
        for depth in range(limit):
            link = self._link(state, token_ids, group, depth)
            node = self._index.find(link.key, parent, link.tokens)
            if node is None:
                break
            found.append(node)
            parent = node
        return found

    def _missing(self, state: KVState, token_ids: np.ndarray, found: list[list[Node]], limit: int) -> list[list[int]]:
        """Which blocks of a sequence are worth reading from disk, by number, of each group of layers.

        Args:
          found: its first blocks of each group, as far as they are known. limit: most blocks it can take over.
        """
        reads = self._disk_reads
        if not reads.enabled or state.has_read:
            return []
        there = []
        for group, nodes in enumerate(found):
            have = [node.is_somewhere or reads.has(node.key) for node in nodes]
            while len(have) < limit and reads.has(self._link(state, token_ids, group, len(have)).key):
                have.append(True)
            there.append(np.array(have, bool))
        count = self.usable(there)
        return [
            [d for d in self._needed(live, count) if d >= len(nodes) or not nodes[d].is_somewhere]
            for nodes, live in zip(found, self.lives, strict=True)
        ]

    def num_cached_tokens(self, state: KVState, token_ids: np.ndarray) -> int:
        """Tokens of a text's beginning that could be taken over now; pins nothing and reads nothing from disk."""
        if not self.enabled:
            return 0
        found = self._known(state, token_ids, (len(token_ids) - 1) // self._index.block_size)
        return self._usable_of(found) * self._index.block_size

    def usable(self, there: Sequence[np.ndarray]) -> int:
        """Longest beginning of a text, in blocks, of which all that later queries see is there in every group.

        Args:
          there: [blocks] bool, of each group of layers.
        """
        count = min(map(len, there))
        while True:
            of_each = [self._usable(live, have[:count]) for live, have in zip(self.lives, there, strict=True)]
            if min(of_each) == count:
                return count
            count = min(of_each)

    def _usable_of(self, found: list[list[Node]]) -> int:
        return self.usable([np.array([node.is_somewhere for node in nodes], bool) for nodes in found])

    def _usable(self, live: LiveRange, there: np.ndarray) -> int:
        """The same of one group."""
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
        """Lets a hit go that found no room; its nodes have not moved since."""
        on_device, on_host = _places(hit.nodes)
        self._device.release(on_device)
        if self._host is not None:
            self._host.release(on_host)

    def claim(self, state: KVState, hit: Hit, num_tokens: int) -> HeldBlocks:
        """Turns a pinned hit into blocks of the device, loading those that are on the host; there is room for them.

        Args:
          num_tokens: of the sequence, for the rate of hits.
        """
        origins = [
            Origin.HIT_DEVICE if node.at[DEVICE] >= 0 else Origin.HIT_DISK if node in state.read else Origin.HIT_HOST
            for node in hit.nodes
        ]
        self._device.load(hit.nodes, hit.num_loads)
        now = self._index.tick()
        for node in hit.nodes:
            node.last_use, node.num_uses = now, node.num_uses + 1
            if self._host is not None:
                self._host.used(node)
        if hit.last:
            state.nodes = dict(enumerate(hit.last))
            state.num_indexed = hit.num_tokens // self._index.block_size
        if state.num_cached_tokens is None:
            state.num_cached_tokens = hit.num_tokens
            self._count(num_tokens, hit, origins)
        ids = np.array([node.at[DEVICE] for node in hit.nodes], np.int32)
        groups = np.array([node.group for node in hit.nodes], np.intp)
        return HeldBlocks(ids, np.array(hit.starts, np.int32), groups, hit.num_tokens, np.array(origins, np.uint8))

    def _count(self, num_tokens: int, hit: Hit, origins: list[Origin]) -> None:
        c = self._counters
        c.asked_tokens += num_tokens
        c.hit_tokens += hit.num_tokens
        c.hits_device += origins.count(Origin.HIT_DEVICE)
        c.hits_host += origins.count(Origin.HIT_HOST)
        c.hits_disk += origins.count(Origin.HIT_DISK)

    def expect(self, state: KVState, token_ids: np.ndarray) -> None:
        """Notes the blocks that a sequence which begins to run will compute, so that others can wait for them."""
        num_blocks = len(token_ids) // self._index.block_size
        for link in self._links(state, token_ids, 0, num_blocks)[state.num_indexed : num_blocks]:
            self._computing.setdefault(link.key, state)

    def expect_no_more(self, state: KVState) -> None:
        """Forgets what a sequence was expected to compute."""
        if self._computing:
            for link in state.links[0]:
                if self._computing.get(link.key) is state:
                    del self._computing[link.key]

    def insert(self, state: KVState, token_ids: np.ndarray, ids: Sequence[list[int]]) -> list[list[int]]:
        """Makes the next full blocks of a running sequence findable.

        Args:
          token_ids: its tokens so far.
          ids: of each group of layers, device blocks of its blocks number state.num_indexed and following; -1 where it
            holds none any more.

        Returns:
          The blocks that it should hold: where another block has the same content already, that one, now shared; the
          caller gives its own back.
        """
        kept = [self._insert(state, token_ids, group, of_group) for group, of_group in enumerate(ids)]
        if state.cacheable:
            state.num_indexed += len(ids[0])
        else:
            state.num_indexed = 0
            state.nodes.clear()
            self.expect_no_more(state)
        return kept

    def _insert(self, state: KVState, token_ids: np.ndarray, group: int, ids: list[int]) -> list[int]:
        index, first = self._index, state.num_indexed
        now = index.tick()
        links = self._links(state, token_ids, group, first + len(ids))
        parent = index.revived(state.nodes.get(group) or index.root(state.salt, group))
        kept = list(ids)
        for at, block in enumerate(ids):
            link = links[first + at]
            if self._computing.get(link.key) is state:
                del self._computing[link.key]
            node = None if parent is None else index.child(parent, link.tokens, link.key)
            if node is None:  # the key is taken by another content: nothing of this text can be found from here on
                state.cacheable = False
                break
            parent = node
            if block < 0:
                continue
            if node.at[DEVICE] < 0:
                if not node.is_somewhere:
                    node.inserted = node.last_use = now
                self._device.keep(node, block)
            elif node.at[DEVICE] != block:
                kept[at] = node.at[DEVICE]
                self._device.share(np.array([kept[at]], np.int32))
        if parent is not None:
            state.nodes[group] = parent
        index.drop_if_empty(parent)
        return kept


def _places(nodes: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Returns blocks of the device that have some nodes' content, and slots of the host that have the others'."""
    on_device = [node.at[DEVICE] for node in nodes if node.at[DEVICE] >= 0]
    on_host = [node.at[HOST] for node in nodes if node.at[DEVICE] < 0]
    return np.array(on_device, np.int32), np.array(on_host, np.int32)
