"""What KV memory knows of one sequence: blocks that it holds while it waits, its place in the prefix index. No jax."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ksana_jax.kv.prefix_index import Link
from ksana_jax.kv.tier import Node


class Origin(enum.IntEnum):
    """How a row came by a block."""

    COMPUTED = 0  # a block of its own, or the equal one that was in the cache before it was full
    HIT_DEVICE = 1  # a cached prefix, on the device
    HIT_HOST = 2
    HIT_DISK = 3
    SHARED = 4  # with another completion or beam of its request
    COPIED = 5  # from a shared block, before it wrote there
    SWAPPED = 6  # its own, back from the host after a preemption

    @property
    def label(self) -> str:
        """As it is written in tables: "hit device"."""
        return _LABELS[self]


_LABELS = tuple(origin.name.lower().replace("_", " ") for origin in Origin)


class HeldBlocks(NamedTuple):
    """Blocks of one sequence: their ids, the text positions where they begin, the group of layers of each, how many of
    its tokens are computed, and the `Origin` of each block or of all."""

    ids: np.ndarray
    starts: np.ndarray
    groups: np.ndarray
    num_computed: int
    origins: np.ndarray | Origin = Origin.COMPUTED


@dataclasses.dataclass(eq=False)
class KVState:
    """KV memory's part of one sequence.

    Args:
      salt: of its prefixes; only sequences of the same salt share them.
      num_blocks_by_origin: blocks that its rows have come by, {origin's label: number}; its request's own dict.
        Computed ones are added when it leaves its row.

    Attributes:
      shared: blocks of another sequence that it shares and brings along while it waits; they may be taken from it.
      swapped: slots of the host that hold its blocks while it waits after a preemption.
      links: of each group of layers the hash chain of its full blocks, as far as it was asked for.
      nodes, num_indexed: of each group the last of them that the prefix index has, and how many it has of every group.
      cacheable: whether more may be added.
      has_read: whether it has looked on the disk. read: what it has read from there.
      num_cached_tokens: tokens that it took from the cache when it first ran; None before that.
    """

    salt: str = ""
    num_blocks_by_origin: dict[str, int] = dataclasses.field(default_factory=dict)
    shared: HeldBlocks | None = None
    swapped: HeldBlocks | None = None
    links: defaultdict[int, list[Link]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    nodes: dict[int, Node] = dataclasses.field(default_factory=dict)
    num_indexed: int = 0
    cacheable: bool = True
    has_read: bool = False
    read: set[Node] = dataclasses.field(default_factory=set)
    num_cached_tokens: int | None = None

    @property
    def held(self) -> HeldBlocks | None:
        """Blocks or slots that it brings along while it waits."""
        return self.shared or self.swapped

    def share_index(self, parent: KVState, num_blocks: int) -> None:
        """Takes over the place in the prefix index of a sequence whose first blocks it shares."""
        self.cacheable = parent.cacheable
        for group, links in parent.links.items():
            self.links[group] = list(links)
        self.num_indexed = min(parent.num_indexed, num_blocks)
        for group, node in parent.nodes.items():
            for _ in range(parent.num_indexed - self.num_indexed):
                assert node.parent is not None
                node = node.parent
            self.nodes[group] = node

    def leave_index(self) -> None:
        """Forgets its place in the prefix index: it holds no blocks any more."""
        self.num_indexed, self.cacheable = 0, True
        self.nodes.clear()
