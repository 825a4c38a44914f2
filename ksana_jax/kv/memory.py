"""Where every KV block is stored: device, host or disk. Knows blocks, tokens and counts; no jax, no scheduling.

The scheduler takes blocks and gives them back; which cached prefix makes room for them, what moves to the host and
from there to disk, and what a prompt can take over is decided here. Nothing is copied here: copies between device and
host are noted as `kv.moves.Moves`, which the executor makes before it computes, so that within a step

    a block that is freed may be taken at once: it is saved before it is overwritten, and
    a block that is loaded or copied may be shared at once: it is there before it is read.

After the step `commit` says that they have been made. A host slot is pinned while a move that touches it is pending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ksana_jax.kv.block_manager import BlockManager
from ksana_jax.kv.costs import Costs
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.disk_reads import DiskReads
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.layout import KVLayout, group_layers
from ksana_jax.kv.moves import Moves, PendingMoves
from ksana_jax.kv.owner import Owner
from ksana_jax.kv.prefix_cache import PrefixCache
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.replacement import Policy, find_policy
from ksana_jax.kv.swap import Swap
from ksana_jax.kv.tier import DEVICE, HOST
from ksana_jax.patterns import FULL

# Blocks that `flush` moves and writes before it waits for the disk.
FLUSHED_AT_ONCE = 64


class KVMemory:
    """Joins the tiers, what moves between them, and what is cached in them.

    Args:
      num_blocks: of the device's pool.
      index: empty; it says how many tokens a block has.
      caching: whether full blocks are kept after use.
      replacement: a key of `replacement.POLICIES`, or see `replacement.find_policy`.
      preempt, write: see `config.EngineConfig.preempt` and `cache_write`.
      host_data: [slots, ...] the host's blocks, preallocated, each as many bytes; None has no host tier.
      disk: None has no disk tier.
      clock: seconds, rising. read_timeout_s: after which a request no longer waits for the disk.

    Attributes:
      device, host: the tiers; host is None where there is none.
      prefixes, disk_reads, swap: what uses them.
      layout: what a block holds.
      num_blocks_by_origin: that rows have come by, see `KVState`.
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex,
        *,
        caching: bool = False,
        replacement: str | Policy = "lru",
        preempt: str = "auto",
        write: str = "back",
        host_data: np.ndarray | None = None,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.perf_counter,
        read_timeout_s: float = 1.0,
    ):
        self.index, self.disk = index, disk
        self.layout = KVLayout(group_layers([FULL]), index.block_size)
        self.counters, self.costs = Counters(), Costs()
        self.num_blocks_by_origin: dict[str, int] = {}
        self._num_blocks, self._replacement, self._caching = num_blocks, find_policy(replacement), caching
        self._preempt, self._write, self._clock, self._read_timeout_s = preempt, write, clock, read_timeout_s
        self._make_tiers(host_data)

    def _make_tiers(self, host_data: np.ndarray | None) -> None:
        index, counters, write = self.index, self.counters, self._write
        self.host: HostTier | None = None
        if host_data is not None and len(host_data):
            self.host = HostTier(host_data, index, self._replacement, counters, disk=self.disk, write=write)
        self.moves = PendingMoves(counters)
        self.device = DeviceTier(
            self._num_blocks, index, self._replacement, counters, moves=self.moves, host=self.host, write=write
        )
        self.disk_reads = DiskReads(index, self.host, self.disk, self._clock, self._read_timeout_s)
        self.prefixes = PrefixCache(self._caching, index, self.device, self.host, self.disk_reads, counters)
        self.swap = Swap(self.device, self.host, self.moves, counters, preempt=self._preempt, costs=self.costs)

    def reset(self, host_data: np.ndarray | None) -> None:
        """Forgets what device and host hold, after a failure that may have left the books half written.

        Args:
          host_data: new blocks of the host: reads from disk that are under way still write to the old ones.
        """
        if self.disk is not None:
            self.disk.reset()
        self.index.clear()
        self._make_tiers(host_data)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.index.block_size

    @property
    def blocks(self) -> BlockManager:
        """The device's pool."""
        return self.device.pool

    def set_layout(self, layout: KVLayout, scope: Scope) -> None:
        """Changes what stays visible and what keys depend on. Only while nothing runs or waits."""
        self.layout, self.index.scope = layout, scope
        self.prefixes.lives = [group.live for group in layout.groups]
        self.index.group_layers = [group.layers for group in layout.groups]
        for tier in (self.device, self.host):
            if tier is not None:
                tier.set_leaves_first([group.live.window is None for group in layout.groups])

    # ------------------------------------------------------------------ around a step

    def take_moves(self) -> Moves | None:
        """Returns what the executor must copy before it computes; None for nothing."""
        return self.moves.take()

    def commit(self) -> None:
        """Says that the moves taken have been made."""
        if self.host is not None:
            self.host.moves_made()

    def flush(self) -> Iterator[None]:
        """Brings cached content to the disk, some blocks at a time, the deepest first.

        Nothing runs and no move is left; after each yield the caller makes those that have come up.
        """
        if self.disk is None or self.host is None or self._write == "drop":
            return
        nodes = {*self.host.node_of.values(), *self.device.node_of.values()}
        nodes = [node for node in nodes if node.key not in self.disk]
        nodes.sort(key=lambda node: (-node.depth, node.key))
        at_once = min(FLUSHED_AT_ONCE, self.host.num_available)
        for start in range(0, len(nodes), at_once):
            for node in nodes[start : start + at_once]:
                if node.at[HOST] >= 0:
                    self.host.write_to_disk(node)
                elif node.is_somewhere:
                    self.device.save(node)
                    self.host.write_to_disk_later(node)
            yield
            self.disk.flush()

    # ------------------------------------------------------------------ who owns what

    def owners(self) -> Iterator[Owner]:
        """Yields moves and late reads, the owners of slots of the host that are no sequences."""
        if self.host is not None:
            yield Owner("", 0, "moves", HOST, np.array(self.host.in_moves, np.int32))
            yield Owner("", 0, "reads", HOST, self.disk_reads.late)

    def moving(self, level: int) -> set[int]:
        """Blocks of a tier whose content is still to come."""
        if level == DEVICE:
            return {*self.moves.copies, *self.moves.loads}
        return {*self.moves.saves, *self.disk_reads.reading()}

    def check(self, owned: Iterable[np.ndarray], swapped: Iterable[np.ndarray] = ()) -> None:
        """Checks that the books agree with what sequences hold.

        Args:
          owned: one array of device blocks per owner. swapped: one array of host slots per owner.

        Raises:
          AssertionError: see `BlockManager.check`, `Tier.check` and `PrefixIndex.check`.
        """
        self.device.pool.check(owned)
        self.device.check()
        self.index.check()
        if self.host is not None:
            own = (owner.ids for owner in self.owners())
            self.host.pool.check([*own, *self.disk_reads.all_reserved(), *swapped])
            self.host.check()
