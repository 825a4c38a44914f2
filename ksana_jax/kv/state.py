"""KV memory's state of one sequence: blocks held while it waits, and its place in the prefix index. No jax."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.core.prefix_report import PrefixReport
from ksana_jax.kv.prefix_index import Link
from ksana_jax.kv.tier import Node


class Origin(enum.IntEnum):
    """Origin of a row's block."""

    COMPUTED = 0  # computed by the row, or replaced by an equal cached block once full
    HIT_DEVICE = 1  # a cached prefix, on the device
    HIT_HOST = 2
    HIT_DISK = 3
    SHARED = 4  # shared with another completion or beam of its request
    COPIED = 5  # copied from a shared block before writing to it
    SWAPPED = 6  # its own, swapped in after a preemption

    @property
    def label(self) -> str:
        """The origin as written in tables: "hit device"."""
        return _LABELS[self]


_LABELS = tuple(origin.name.lower().replace("_", " ") for origin in Origin)


class HeldBlocks(NamedTuple):
    """Blocks of one sequence: their ids, the cache positions where they begin, their groups of layers, the number
    of its computed tokens, the `Origin` of each block or all, the evicted tokens of each group [Gk] or all, and the
    slot of the state of recurrent layers after the computed tokens; FAR for none."""

    ids: np.ndarray
    starts: np.ndarray
    groups: np.ndarray
    num_computed: int
    origins: np.ndarray | Origin = Origin.COMPUTED
    num_evicted: np.ndarray | int = 0
    state: int = FAR

    @property
    def num_cached(self) -> np.ndarray | int:
        """Tokens in the cache, for each block in its group of layers."""
        evicted = self.num_evicted
        return self.num_computed - (evicted[self.groups] if isinstance(evicted, np.ndarray) else evicted)

    def allocated_until(self, block_size: int) -> int:
        """Sequence position of the token that will need new blocks."""
        room = (self.num_evicted - self.num_computed) % block_size
        return self.num_computed + int(np.max(room))


NO_BLOCKS = HeldBlocks(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.intp), 0)


@dataclasses.dataclass(eq=False)
class KVState:
    """KV memory's state of one sequence.

    Args:
      salt: prefixes are shared only among sequences with equal salts.
      num_blocks_by_origin: blocks that the rows of its request obtained, {origin's label: number}; a dict of the
        request. Computed blocks are added when the sequence leaves its row.

    Attributes:
      shared: blocks that it shares with another sequence and keeps while it waits; they may be reclaimed.
      swapped: host slots that hold its blocks while it waits after a preemption.
      links: for each group of layers, the hash chain of its full blocks, as far as computed.
      nodes, num_indexed: for each group, its last block in the prefix index; and the number of its blocks there.
      num_expected: leading full blocks that it has, or will compute and index; 0 where none are left.
      expects: key of the next of these blocks, if other sequences wait for this one.
      cacheable: True if more blocks may be added to the prefix index. has_read: True once it has looked for blocks on
        disk. read: the blocks that it has read from there.
      num_cached_tokens: tokens that it reused when it first ran; prefix_report: why no more. None before that.
      reach: with recurrent layers, how many tokens' keys and values were cached, and after how many the last state.
    """

    salt: str = ""
    num_blocks_by_origin: dict[str, int] = dataclasses.field(default_factory=dict)
    shared: HeldBlocks | None = None
    swapped: HeldBlocks | None = None
    links: defaultdict[int, list[Link]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    nodes: dict[int, Node] = dataclasses.field(default_factory=dict)
    num_indexed: int = 0
    num_expected: int = 0
    expects: bytes | None = None
    cacheable: bool = True
    has_read: bool = False
    read: set[Node] = dataclasses.field(default_factory=set)
    num_cached_tokens: int | None = None
    reach: tuple[int, int] | None = None
    prefix_report: PrefixReport | None = None

    @property
    def held(self) -> HeldBlocks | None:
        """Blocks or slots that it holds while it waits."""
        return self.shared or self.swapped

    def share_index(self, parent: KVState, num_blocks: int) -> None:
        """Copies the place in the prefix index of a sequence whose first num_blocks blocks it shares; accepted drafts
        may have taken the parent beyond them."""
        self.cacheable = parent.cacheable
        for group, links in parent.links.items():
            self.links[group] = links[:num_blocks]
        self.num_indexed = min(parent.num_indexed, num_blocks)
        for group, node in parent.nodes.items():
            for _ in range(parent.num_indexed - self.num_indexed):
                assert node.parent is not None
                node = node.parent
            self.nodes[group] = node

    def leave_index(self) -> None:
        """Forgets its place in the prefix index, because it no longer holds blocks."""
        self.num_indexed, self.cacheable = 0, True
        self.nodes.clear()
