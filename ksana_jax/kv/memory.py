"""Where every KV block lives: device, host or disk. Knows blocks, tokens and counts; no jax, no scheduling.

The scheduler asks for blocks and gives them back; which cached prefix makes room for them, what moves to the host and
from there to disk, and what a prompt can take over is decided here. Nothing is copied here: copies between device and
host are noted as `step.Moves`, which the executor makes before it computes, so that within a step

    a block that is freed may be taken at once: it is saved before it is overwritten, and
    a block that is loaded or copied may be shared at once: it is there before it is read.

After the step `commit` says that they have been made. A host slot is pinned while a move that touches it is pending.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

import numpy as np

from ksana_jax.kv.block_manager import BlockManager, NoFreeBlocks
from ksana_jax.kv.disk_tier import BlockFacts, DiskTier
from ksana_jax.kv.loads import Loads
from ksana_jax.kv.patterns import FULL, LiveRange
from ksana_jax.kv.prefix_index import PrefixIndex, Scope, sha256
from ksana_jax.kv.replacement import POLICIES
from ksana_jax.kv.tier import DEVICE, HOST, Node, Tier
from ksana_jax.sequence import Held, Sequence
from ksana_jax.step import Moves

_NO_PAIRS = np.zeros((0, 2), np.int32)


@dataclasses.dataclass
class Counters:
    """What has happened since the engine started, in blocks unless it says otherwise.

    asked_tokens, hit_tokens: of prompts looked up, and found. hits_device, hits_host, hits_disk: where.
    evicted, evicted_host: cached blocks that left the device, the host. saved, loaded, copied: blocks moved from the
    device, to it, within it. swapped_out, swapped_in: of those, for preempted rows.
    """

    asked_tokens: int = 0
    hit_tokens: int = 0
    hits_device: int = 0
    hits_host: int = 0
    hits_disk: int = 0
    evicted: int = 0
    evicted_host: int = 0
    saved: int = 0
    loaded: int = 0
    copied: int = 0
    swapped_out: int = 0
    swapped_in: int = 0


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


class KVMemory:
    """Owns the device's pool, the host's slots and the disk's files.

    Args:
      num_blocks, block_size: of the device's pool.
      caching: whether full blocks are kept after use.
      eviction: a key of `replacement.POLICIES`.
      preempt: see `config.EngineConfig`.
      host_data: [slots, ...] the host's blocks, preallocated; None has no host tier.
      disk: None has no disk tier.
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
        eviction: str = "lru",
        preempt: str = "auto",
        host_data: np.ndarray | None = None,
        disk: DiskTier | None = None,
        write: str = "back",
        scope: Scope | None = None,
        digest: Callable[[bytes], bytes] = sha256,
        cost: Callable[[int], float] = lambda position: 1.0,
        clock: Callable[[], float] = time.perf_counter,
        load_timeout_s: float = 1.0,
    ):
        if eviction not in POLICIES:
            raise ValueError(f"prefix_eviction is {eviction!r}, must be one of {', '.join(POLICIES)}")
        self.caching, self.preempt, self.write = caching, preempt, write
        self.block_size = block_size
        self.device = Tier(DEVICE, num_blocks, block_size, POLICIES[eviction])
        self.host: Tier | None = None
        if host_data is not None and len(host_data):
            self.host = Tier(HOST, len(host_data), block_size, POLICIES[eviction])
        self.host_data, self.disk = host_data, disk
        self.index = PrefixIndex(block_size, scope or Scope(), digest, cost)
        self.loads = Loads(self, clock, load_timeout_s)
        self.counters = Counters()
        self.live = LiveRange.of([FULL])
        # Seconds of a computed token and of a moved block, the last ones.
        self._token_costs: deque[float] = deque(maxlen=33)
        self._block_costs: deque[float] = deque(maxlen=33)
        self._computing: dict[bytes, Sequence] = {}
        self._saves: dict[int, int] = {}  # host slot -> device block
        self._copies: dict[int, int] = {}  # to -> from
        self._loads: dict[int, int] = {}  # device block -> host slot
        self._pins: list[int] = []  # host slots of pending moves
        self._through: list[Node] = []  # to be written to disk once they are on the host

    @property
    def blocks(self) -> BlockManager:
        """The device's pool."""
        return self.device.pool

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

    # ------------------------------------------------------------------ cached prefixes

    def pin(self, seq: Sequence) -> Hit:
        """Finds the longest cached beginning of a sequence that leaves at least one token to compute, and pins it.

        Under a pattern that evicts, only the blocks that later queries see are needed and pinned.
        """
        hit = Hit([], [], 0)
        if not self.caching or seq.params.prompt_logprobs is not None:  # a score needs its token computed
            return hit
        limit = (len(seq.token_ids) - 1) // self.block_size
        found: list[Node] = []
        parent = self.index.root(seq.salt)
        for depth in range(limit):
            link = self.index.chain(seq.token_ids, seq.salt, seq.links, depth + 1)[depth]
            node = self.index.find(link.key, parent, link.tokens)
            if node is None:
                break
            found.append(node)
            parent = node
        on_disk = self.loads.missing(seq, found, limit)
        if on_disk and self.loads.begin(seq, found, on_disk):
            hit.awaits = True
            return hit
        num_blocks = self.usable(np.array([node.is_somewhere for node in found], bool))
        if num_blocks < limit:
            link = self.index.chain(seq.token_ids, seq.salt, seq.links, num_blocks + 1)[num_blocks]
            if self._computing.get(link.key, seq) is not seq:
                hit.awaits = True
                return hit
        starts = np.arange(num_blocks) * self.block_size
        alive = ~self.live.dead_blocks(starts, self.block_size, num_blocks * self.block_size)
        hit.starts = starts[alive].tolist()
        hit.nodes = [found[start // self.block_size] for start in hit.starts]
        hit.num_tokens = num_blocks * self.block_size
        on_device = [n.at[DEVICE] for n in hit.nodes if n.at[DEVICE] >= 0]
        on_host = [n.at[HOST] for n in hit.nodes if n.at[DEVICE] < 0]
        hit.num_loads = len(on_host)
        self.share(np.array(on_device, np.int32))
        if self.host is not None:
            self.host.pool.share(np.array(on_host, np.int32))
        return hit

    def usable(self, there: np.ndarray) -> int:
        """Longest beginning of a text, in blocks, of which all that later queries see is there.

        Args:
          there: [blocks] bool.
        """
        if self.live.window is None:
            return len(there) if there.all() else int(there.argmin())
        starts = np.arange(len(there)) * self.block_size
        for count in range(len(there), 0, -1):
            if there[count - 1]:
                alive = ~self.live.dead_blocks(starts[:count], self.block_size, count * self.block_size)
                if there[:count][alive].all():
                    return count
        return 0

    def unpin(self, hit: Hit) -> None:
        """Lets a hit go that found no room."""
        on_device = [n.at[DEVICE] for n in hit.nodes if n.at[DEVICE] >= 0]
        on_host = [n.at[HOST] for n in hit.nodes if n.at[DEVICE] < 0]
        self.release(np.array(on_device, np.int32))
        if self.host is not None:
            self.host.release(np.array(on_host, np.int32))

    def claim(self, seq: Sequence, hit: Hit) -> Held:
        """Turns a pinned hit into blocks of the device, loading those that are on the host; there is room for them."""
        now = self.index.tick()
        new = self.allocate(hit.num_loads).tolist()
        ids = []
        for node in hit.nodes:
            if node.at[DEVICE] < 0:
                block = new.pop()
                self._loads[block] = node.at[HOST]
                self._pins.append(node.at[HOST])
                self.device.put(node, block)
            ids.append(node.at[DEVICE])
            node.last_use, node.num_uses = now, node.num_uses + 1
            if self.host is not None:
                self.host.used(node)
        if hit.nodes:
            seq.node, seq.num_indexed = hit.nodes[-1], hit.num_tokens // self.block_size
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = hit.num_tokens
            self._count(seq, hit)
        return Held(np.array(ids, np.int32), np.array(hit.starts, np.int32), hit.num_tokens)

    def _count(self, seq: Sequence, hit: Hit) -> None:
        c = self.counters
        c.asked_tokens += len(seq.token_ids)
        c.hit_tokens += hit.num_tokens
        c.hits_host += hit.num_loads - seq.num_read
        c.hits_disk += seq.num_read
        c.hits_device += len(hit.nodes) - hit.num_loads

    def expect(self, seq: Sequence) -> None:
        """Notes the blocks that a sequence which begins to run will compute, so that others can wait for them."""
        if self.caching:
            num_blocks = len(seq.token_ids) // self.block_size
            links = self.index.chain(seq.token_ids, seq.salt, seq.links, num_blocks)
            for link in links[seq.num_indexed : num_blocks]:
                self._computing.setdefault(link.key, seq)

    def expect_no_more(self, seq: Sequence) -> None:
        """Forgets what a sequence was expected to compute."""
        if self._computing:
            for link in seq.links:
                if self._computing.get(link.key) is seq:
                    del self._computing[link.key]

    def insert(self, seq: Sequence, token_ids: np.ndarray, ids: list[int]) -> list[int]:
        """Makes the next full blocks of a running sequence findable.

        Args:
          token_ids: its tokens so far.
          ids: device blocks of its blocks number seq.num_indexed and following; -1 where it holds none any more.

        Returns:
          The blocks that it should hold: where another block has the same content already, that one, now shared; the
          caller gives its own back.
        """
        first, now = seq.num_indexed, self.index.tick()
        links = self.index.chain(token_ids, seq.salt, seq.links, first + len(ids))
        parent = self.index.revived(seq.node or self.index.root(seq.salt))
        kept = list(ids)
        for at, block in enumerate(ids):
            link = links[first + at]
            if self._computing.get(link.key) is seq:
                del self._computing[link.key]
            node = None if parent is None else self.index.child(parent, link.tokens, link.key)
            if node is None:  # the key is taken by another content: nothing of this text can be found from here on
                seq.cacheable = False
                break
            parent = node
            if block < 0:
                continue
            if node.at[DEVICE] < 0:
                if not node.is_somewhere:
                    node.inserted = node.last_use = now
                self.device.put(node, block)
                if self.write == "through":
                    self._save(node)
            elif node.at[DEVICE] != block:
                kept[at] = node.at[DEVICE]
                self.share(np.array([kept[at]], np.int32))
        else:
            seq.num_indexed = first + len(ids)
        seq.node = parent
        self.index.drop_if_empty(parent)
        return kept

    # ------------------------------------------------------------------ eviction

    def _evict_from_device(self) -> None:
        node = self.device.victim()
        assert node is not None, "idle blocks, and none of them can be evicted"
        if self.write != "drop":
            self._save(node)
        self.counters.evicted += 1
        self._loads.pop(node.at[DEVICE], None)
        self.device.drop(node)
        self.index.drop_if_empty(node)

    def _save(self, node: Node) -> None:
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
        if self.preempt == "swap" or not self._block_costs or not self._token_costs:
            return True
        # Medians: a step that compiled took seconds.
        return 2 * num_blocks * median(self._block_costs) < num_tokens * median(self._token_costs)

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
        """Whether it wants to `observe` steps."""
        return self.preempt == "auto" and self.host is not None

    def observe(self, num_tokens: int, step_s: float, moves: Moves | None, move_s: float) -> None:
        """Learns what computing and moving cost.

        Args:
          num_tokens: computed in a step, if chunks were among them; 0 otherwise.
          step_s: seconds of the step, its moves included. move_s: of the moves alone; 0 where it is not known.
        """
        if moves is not None and move_s:
            self._block_costs.append(move_s / (len(moves.saves) + len(moves.copies) + len(moves.loads)))
        if num_tokens and (moves is None or move_s):
            self._token_costs.append((step_s - move_s) / num_tokens)

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

    def flush(self) -> None:
        """Notes that all cached content of the device shall go to the disk; the moves that are left bring it there."""
        if self.disk is None or self.host is None or self.write == "drop":
            return
        for tier in (self.host, self.device):
            for node in list(tier.node_of.values()):
                if node.at[HOST] >= 0 and node.at[HOST] not in self._pins:
                    self._write_to_disk(node)
                elif node.at[HOST] < 0 and self.host.pool.num_free:
                    self._save(node)
                    self._through.append(node)

    def lose_device(self, moves: Moves | None) -> None:
        """Forgets what the device held, after a step that failed and may not have made its moves. Nothing runs."""
        unsaved = set() if moves is None else set(moves.saves[:, 1].tolist())
        unsaved |= set(self._saves)
        self._saves, self._copies, self._loads, self._through = {}, {}, {}, []
        for tier, lost in ((self.device, list(self.device.node_of)), (self.host, unsaved)):
            for node in [tier.node_of[block] for block in lost if block in tier.node_of] if tier else ():
                assert tier is not None
                tier.drop(node)
                self.index.drop_if_empty(node)
        self.commit()

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
            held = [np.array(self._pins, np.int32), *self.loads.held()]
            self.host.pool.check([*held, *swapped])
            self.host.check()


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    found = list(pairs)
    return np.array(found, np.int32) if found else _NO_PAIRS
