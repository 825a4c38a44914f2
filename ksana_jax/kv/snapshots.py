"""Snapshots: caches the blocks of whole rows whose content is more than the keys and values of their tokens.

After an eviction, blocks hold some tokens of a sequence; if the method adds up attention, they hold sums over all
queries so far. Neither is known from the tokens of a block and those before it, so such blocks are found by the whole
sequence and by all that decides what it leaves behind. Knows tokens, no requests; no jax.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.state import HeldBlocks, KVState
from ksana_jax.kv.tier import Node

# Keys of their blocks begin with this: they are not found by tokens.
SNAPSHOT_KEY = b"snapshot"


class Snapshot(NamedTuple):
    """A row after the tokens of a sequence: its blocks, the cache positions where they begin, and the number of tokens
    [Gk] that each group of layers has evicted. It is of use while all blocks are stored."""

    nodes: list[Node]
    starts: list[int]
    num_evicted: np.ndarray

    @property
    def is_stored(self) -> bool:
        return all(node.is_stored for node in self.nodes)


class Snapshots:
    """Finds and caches snapshots. Their blocks are cached blocks like others: of the same pool, replaced by the same
    policy.

    Attributes:
      schedule: decides the evictions; it is part of a snapshot's key.
    """

    def __init__(self, index: PrefixIndex, device: DeviceTier):
        self.schedule: EvictionSchedule
        self._index, self._device = index, device
        self._of: dict[tuple[object, ...], dict[bytes, Snapshot]] = {}
        self._numbers, self._most = itertools.count(), 64

    def set_schedule(self, schedule: EvictionSchedule) -> None:
        """Changes the evictions. Only while nothing runs or waits."""
        self.schedule, self._setting = schedule, repr(schedule)

    def _key(self, state: KVState, num_context: int) -> tuple[object, ...]:
        """Returns all that a sequence's state depends on besides its tokens."""
        return state.salt, self._index.scope, self._setting, num_context * self.schedule.counts_prompt

    def find(self, state: KVState, token_ids: np.ndarray, num_context: int) -> tuple[int, Snapshot] | None:
        """Returns the longest beginning of a sequence that has a snapshot: its number of tokens, and the snapshot."""
        found, data = self._of.get(self._key(state, num_context), {}), np.asarray(token_ids, np.int32).tobytes()
        for tokens in sorted((tokens for tokens in found if data.startswith(tokens)), key=len, reverse=True):
            if found[tokens].is_stored:
                return len(tokens) // 4, found[tokens]
            del found[tokens]
        return None

    def keep(self, state: KVState, token_ids: np.ndarray, num_context: int, held: HeldBlocks) -> bool:
        """Caches the blocks of a row after some tokens; returns False if a snapshot of it is there already.

        Args:
          held: the blocks, which nothing writes to any more; their `starts` are cache positions.
        """
        mine = self._of.setdefault(self._key(state, num_context), {})
        tokens = np.asarray(token_ids, np.int32).tobytes()
        if (found := mine.get(tokens)) is not None and found.is_stored:
            return False
        nodes = []
        for block, start, group in zip(held.ids.tolist(), held.starts.tolist(), held.groups.tolist(), strict=True):
            if (node := self._device.node_of.get(block)) is None:
                key = b"%b%d" % (SNAPSHOT_KEY, next(self._numbers))
                node = self._index.add(self._index.root(state.salt, group), key, start // self._index.block_size)
                self._device.keep(node, block)
            nodes.append(node)
        assert isinstance(held.num_evicted, np.ndarray)
        mine[tokens] = Snapshot(nodes, held.starts.tolist(), held.num_evicted)
        self._forget_lost()
        return True

    def _forget_lost(self) -> None:
        """Forgets snapshots that have lost a block, whenever their number may have doubled."""
        if sum(map(len, self._of.values())) <= self._most:
            return
        for key, snapshots in list(self._of.items()):
            self._of[key] = {tokens: found for tokens, found in snapshots.items() if found.is_stored}
            if not self._of[key]:
                del self._of[key]
        self._most = 64 + 2 * sum(map(len, self._of.values()))
