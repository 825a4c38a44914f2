"""What a prompt can take over from the cache, and what enters it. Knows tokens and nodes, no requests; no jax."""

from __future__ import annotations

import dataclasses

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

    awaits: its next block is just being computed by a running row, or read from disk: better come back.
    """

    nodes: list[Node]
    starts: list[int]
    num_tokens: int
    num_loads: int = 0
    awaits: bool = False


class PrefixCache:
    """Cached prefixes: full blocks by what they hold.

    Args:
      enabled: whether full blocks are kept after use.
      index: which content there is. device, host: where it is stored. disk_reads: bring more of it to the host.

    Attributes:
      live: which positions stay visible to later tokens.
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
        self.enabled, self.live = enabled, LiveRange.of([FULL])
        self._index, self._device, self._host = index, device, host
        self._disk_reads, self._counters = disk_reads, counters
        self._computing: dict[bytes, KVState] = {}

    def pin(self, state: KVState, token_ids: np.ndarray, max_tokens: int) -> Hit:
        """Finds the longest cached beginning of a sequence, of at most max_tokens tokens, and pins it.

        Under a pattern that evicts, only the blocks that later queries see are needed and pinned.
        """
        hit, size = Hit([], [], 0), self._index.block_size
        limit = max_tokens // size
        if not self.enabled or not limit:
            return hit
        found = self._known(state, token_ids, limit)
        on_disk = self._missing(state, token_ids, found, limit)
        if on_disk and self._disk_reads.begin(state, found, on_disk):
            hit.awaits = True
            return hit
        num_blocks = self.usable(np.array([node.is_somewhere for node in found], bool))
        if num_blocks < limit:
            key = self._link(state, token_ids, num_blocks).key
            if self._computing.get(key, state) is not state:
                hit.awaits = True
                return hit
        starts = np.arange(num_blocks) * size
        alive = ~self.live.dead_blocks(starts, size, num_blocks * size)
        hit.starts = starts[alive].tolist()
        hit.nodes = [found[start // size] for start in hit.starts]
        hit.num_tokens = num_blocks * size
        hit.num_loads = sum(node.at[DEVICE] < 0 for node in hit.nodes)
        on_device, on_host = _places(hit.nodes)
        self._device.share(on_device)
        if self._host is not None:
            self._host.pool.share(on_host)
        return hit

    def _link(self, state: KVState, token_ids: np.ndarray, depth: int) -> Link:
        """The link of a sequence's block of a number."""
        return self._index.chain(token_ids, state.salt, state.links, depth + 1)[depth]

    def _known(self, state: KVState, token_ids: np.ndarray, limit: int) -> list[Node]:
        """The first blocks of a sequence as far as the index has them, at most `limit`."""
        found: list[Node] = []
        parent = self._index.root(state.salt)
        for depth in range(limit):
            link = self._link(state, token_ids, depth)
            node = self._index.find(link.key, parent, link.tokens)
            if node is None:
                break
            found.append(node)
            parent = node
        return found

    def _missing(self, state: KVState, token_ids: np.ndarray, found: list[Node], limit: int) -> list[int]:
        """Which blocks of a sequence are worth reading from disk, by number.

        Args:
          found: its first blocks, as far as they are known. limit: most blocks it can take over.
        """
        reads, size = self._disk_reads, self._index.block_size
        if not reads.enabled or state.has_read:
            return []
        there = [node.is_somewhere or reads.has(node.key) for node in found]
        for depth in range(len(found), limit):
            if not reads.has(self._link(state, token_ids, depth).key):
                break
            there.append(True)
        count = self.usable(np.array(there, bool))
        alive = ~self.live.dead_blocks(np.arange(count) * size, size, count * size)
        return [d for d in np.flatnonzero(alive).tolist() if d >= len(found) or not found[d].is_somewhere]

    def num_cached_tokens(self, state: KVState, token_ids: np.ndarray) -> int:
        """Tokens of a text's beginning that could be taken over now; pins nothing and reads nothing from disk."""
        if not self.enabled:
            return 0
        found = self._known(state, token_ids, (len(token_ids) - 1) // self._index.block_size)
        return self.usable(np.array([node.is_somewhere for node in found], bool)) * self._index.block_size

    def usable(self, there: np.ndarray) -> int:
        """Longest beginning of a text, in blocks, of which all that later queries see is there.

        Args:
          there: [blocks] bool.
        """
        live, size = self.live, self._index.block_size
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
        if hit.nodes:
            state.node, state.num_indexed = hit.nodes[-1], hit.num_tokens // self._index.block_size
        if state.num_cached_tokens is None:
            state.num_cached_tokens = hit.num_tokens
            self._count(num_tokens, hit, origins)
        ids = np.array([node.at[DEVICE] for node in hit.nodes], np.int32)
        return HeldBlocks(ids, np.array(hit.starts, np.int32), hit.num_tokens, np.array(origins, np.uint8))

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
        for link in self._index.chain(token_ids, state.salt, state.links, num_blocks)[state.num_indexed : num_blocks]:
            self._computing.setdefault(link.key, state)

    def expect_no_more(self, state: KVState) -> None:
        """Forgets what a sequence was expected to compute."""
        if self._computing:
            for link in state.links:
                if self._computing.get(link.key) is state:
                    del self._computing[link.key]

    def insert(self, state: KVState, token_ids: np.ndarray, ids: list[int]) -> list[int]:
        """Makes the next full blocks of a running sequence findable.

        Args:
          token_ids: its tokens so far.
          ids: device blocks of its blocks number state.num_indexed and following; -1 where it holds none any more.

        Returns:
          The blocks that it should hold: where another block has the same content already, that one, now shared; the
          caller gives its own back.
        """
        index, first = self._index, state.num_indexed
        now = index.tick()
        links = index.chain(token_ids, state.salt, state.links, first + len(ids))
        parent = index.revived(state.node or index.root(state.salt))
        kept = list(ids)
        for at, block in enumerate(ids):
            link = links[first + at]
            if self._computing.get(link.key) is state:
                del self._computing[link.key]
            node = None if parent is None else index.child(parent, link.tokens, link.key)
            if node is None:  # the key is taken by another content: nothing of this text can be found from here on
                state.cacheable, state.node, state.num_indexed = False, None, 0
                self.expect_no_more(state)
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
        else:
            state.node, state.num_indexed = parent, first + len(ids)
        index.drop_if_empty(parent)
        return kept


def _places(nodes: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Returns blocks of the device that have some nodes' content, and slots of the host that have the others'."""
    on_device = [node.at[DEVICE] for node in nodes if node.at[DEVICE] >= 0]
    on_host = [node.at[HOST] for node in nodes if node.at[DEVICE] < 0]
    return np.array(on_device, np.int32), np.array(on_host, np.int32)
