"""Manages KV blocks on device, host and disk. Knows blocks, tokens and counts; no jax, no scheduling.

The scheduler allocates and releases blocks. KVMemory decides which cached prefixes they replace, which blocks move to
host and disk, and which cached blocks a prompt can reuse. It copies nothing itself: copies between device and host are
recorded as `kv.moves.Moves`, and the executor makes them before it computes. Within a step, therefore,

    a freed block may be reallocated at once: it is saved before it is overwritten, and
    a block being loaded or copied may be shared at once: it arrives before it is read.

After the step, `commit` confirms the moves. A host slot is pinned while a move that touches it is pending.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ksana_jax.core.patterns import FULL
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.disk_reads import DiskReads
from ksana_jax.kv.groups import group_layers
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.moves import Moves, PendingMoves
from ksana_jax.kv.prefix_cache import PrefixCache
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.replacement import ReplacementPolicy, find_replacement_policy
from ksana_jax.kv.state import NO_BLOCKS, HeldBlocks, KVState
from ksana_jax.kv.state_slots import StateSlots
from ksana_jax.kv.swap import Costs, Swap
from ksana_jax.kv.tier import CacheListener


class KVMemory:
    """Manages KV blocks on all tiers: allocation, prefix cache, disk reads, swapping, and moves between tiers.

    Args:
      num_blocks: blocks in the device's pool. index: an empty prefix index; it determines the block size.
      caching: True if full blocks are kept after use. preempt, write: see `config.EngineConfig.preempt`, `cache_write`.
      replacement: a key of `replacement.REPLACEMENT_POLICIES`, or see `replacement.find_replacement_policy`.
      host_data: [slots, ...] the host's blocks, preallocated, each of block_bytes; None for no host tier.
      disk: the disk tier, or None.
      host_states, disk_states: the same for states of recurrent layers, in slots of their own.
      clock: monotonic time in seconds. read_timeout_s: limit after which a request no longer waits for the disk.

    Attributes:
      device, host: tiers; host is None without one. blocks: the device's pool. block_size: B, tokens of a block.
      prefixes: prefix cache; without `caching` nothing asks it.
      disk_reads: disk reads of waiting sequences; None without a disk and a host tier.
      swap: swapping of preempted sequences; None without a host tier. layout: contents of a block.
      states: slots for states of recurrent layers; None without any.
      listeners: told of blocks that device and host cache, use and drop. state_listeners: told of states.
      num_blocks_by_origin: blocks that rows obtained, by origin, see `KVState`.
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex,
        *,
        caching: bool = False,
        replacement: str | ReplacementPolicy = "lru",
        preempt: str = "auto",
        write: str = "back",
        host_data: np.ndarray | None = None,
        host_states: np.ndarray | None = None,
        disk: DiskTier | None = None,
        disk_states: DiskTier | None = None,
        clock: Callable[[], float] = time.perf_counter,
        read_timeout_s: float = 1.0,
    ):
        self.index, self.disk, self.block_size = index, disk, index.block_size
        self.layout = KVLayout(group_layers([FULL]), index.block_size)
        self.counters, self.costs = Counters(), Costs()
        self.num_blocks_by_origin: dict[str, int] = {}
        self._replacement, self._caching = find_replacement_policy(replacement), caching
        self._preempt, self._write, self.clock, self._read_timeout_s = preempt, write, clock, read_timeout_s
        self.listeners: list[CacheListener] = []
        self.state_listeners: list[CacheListener] = []
        self.disk_states = disk_states
        self._make_tiers(num_blocks, host_data, host_states)

    def _make_tiers(self, num_blocks: int, host_data: np.ndarray | None, host_states: np.ndarray | None) -> None:
        index, counters, write = self.index, self.counters, self._write
        self.host: HostTier | None = None
        if host_data is not None and len(host_data):
            self.host = HostTier(host_data, index, self._replacement, counters, disk=self.disk, write=write)
        self.moves = PendingMoves(counters)
        self.device = DeviceTier(
            num_blocks, index, self._replacement, counters, moves=self.moves, host=self.host, write=write
        )
        self.blocks, self.disk_reads, self.swap = self.device.pool, None, None
        self.states, self._host_states, self.hosts = None, host_states, [self.host] if self.host else []
        if self.host is not None:
            if self.disk is not None:
                self.disk_reads = DiskReads(index, self.host, self.disk, self.clock, self._read_timeout_s)
            self.swap = Swap(self.device, self.host, self.moves, counters, preempt=self._preempt, costs=self.costs)
        self.prefixes = PrefixCache(self._caching, index, self.device, self.host, self.disk_reads, counters)
        for tier in (self.device, self.host):
            if tier is not None:
                tier.listeners = self.listeners

    def reset(self, host_data: np.ndarray | None, host_states: np.ndarray | None = None) -> None:
        """Forgets the contents of device and host after a failure that may have left the bookkeeping inconsistent.

        Args:
          host_data, host_states: new arrays, because running disk reads still write to the old ones.
        """
        for disk in (self.disk, self.disk_states):
            if disk is not None:
                disk.reset()
        self.index.clear()
        self._make_tiers(self.blocks.num_blocks, host_data, host_states)
        for listener in self.listeners:
            listener.cleared()

    def set_layout(self, layout: KVLayout, scope: Scope) -> None:
        """Changes the visible positions and the scope of cache keys. Only while nothing runs or waits."""
        self.layout = layout
        self.index.set_scope(scope)
        if layout.states is not None and self.states is None:
            slots, group, told = layout.states.num_slots, len(layout.groups), self.state_listeners
            more: dict[str, Any] = {"host_data": self._host_states, "disk": self.disk_states, "write": self._write}
            self.states = StateSlots(slots, group, self.index, self._replacement, self.counters, listeners=told, **more)
            self.hosts += [self.states.host] if self.states.host else []
        self.prefixes.set_layout(layout, self.states)
        self.index.group_keys = layout.group_keys
        for tier in (self.device, self.host):
            if tier is not None:
                tier.set_leaves_first([group.live.window is None for group in layout.groups])

    def begin(self, state: KVState, num_tokens: int) -> HeldBlocks:
        """Returns a sequence's blocks at its start without a cached prefix: none. num_tokens: of the sequence."""
        if state.num_cached_tokens is None:
            state.num_cached_tokens = 0
            self.counters.queried_tokens += num_tokens
        return NO_BLOCKS

    def take_moves(self) -> Moves | None:
        """Returns the copies that the executor must make before it computes; None without any."""
        for host in self.hosts:
            host.moves_taken()
        moves, states = self.moves, None if self.states is None else self.states.moves
        if states is not None and states.any:
            return dataclasses.replace(moves.take(), states=states.take())
        return moves.take() if moves.saves or moves.copies or moves.loads or moves.evictions else None

    def commit(self) -> None:
        """Confirms that the moves taken have been made."""
        for host in self.hosts:
            host.moves_made()
