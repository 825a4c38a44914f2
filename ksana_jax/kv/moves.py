"""Records moves of keys and values, which the executor makes before a step computes. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.kv.counters import Counters

_NO_PAIRS = np.zeros((0, 2), np.int32)


class Evictions(NamedTuple):
    """Evictions of n rows, each in one group of layers: int32 arrays [n], and block tables [n, P].

    The kept tokens move to a row's first slots, each layer and head choosing its own; see `kv.eviction`. Or they stay
    where they are, in the first `length` slots, and the others are hidden (`EvictionMethod.hides`).

    tables: blocks of the row before; any valid id beyond them. targets: blocks of its first slots afterwards, [n, P],
    which are those in `tables` unless others read them too. num_tokens: cached before. num_kept: afterwards.
    num_sinks, num_recent: first and newest tokens that are certainly kept. length: of the row. group: of layers.
    num_prompt: of its tokens, without a question.
    given: None, or [n, Lg, K, T] float32, see `EvictionMethod.given`.
    """

    tables: Any
    targets: Any
    num_tokens: Any
    num_kept: Any
    num_sinks: Any
    num_recent: Any
    length: Any
    group: Any
    num_prompt: Any
    given: Any = None


@dataclasses.dataclass
class Moves:
    """Moves before a step computes, in the order of the fields.

    All but evictions copy whole blocks and are [n, 2] int32 of source and target ids.

    evictions: of earlier steps, in their order. saves: device blocks to host slots; the first num_early[i] of them
    come before eviction i, which may write to their sources. copies: device blocks to device blocks (copy-on-write),
    all read before any is written. loads: host slots to device blocks. states: the same of states of recurrent layers,
    between the slots of device and host; None without any.
    """

    saves: np.ndarray
    copies: np.ndarray
    loads: np.ndarray
    evictions: Sequence[Evictions] = ()
    num_early: Sequence[int] = ()
    states: Moves | None = None

    @property
    def num_moved(self) -> int:
        """Number of blocks and states that are copied."""
        return len(self.saves) + len(self.copies) + len(self.loads) + (self.states.num_moved if self.states else 0)


class PendingMoves:
    """Collects the moves recorded since the last step.

    saves: {host slot: device block}. early_saves: saves recorded between each eviction and the previous one.
    copies: {new device block: its source}. loads: {device block: host slot}. evictions: in the order of
    their steps.
    """

    def __init__(self, counters: Counters):
        self.saves: dict[int, int] = {}
        self.early_saves: list[dict[int, int]] = []
        self.copies: dict[int, int] = {}
        self.loads: dict[int, int] = {}
        self.evictions: list[Evictions] = []
        self._counters = counters

    @property
    def any(self) -> bool:
        """True if a move is pending."""
        return bool(self.saves or self.copies or self.loads or self.evictions)

    @property
    def all_saves(self) -> list[dict[int, int]]:
        """Saves in their order: `early_saves`, then `saves`."""
        return [*self.early_saves, self.saves]

    def save(self, block: int, slot: int) -> None:
        """Records a copy of a device block to a host slot."""
        # If the block itself is the target of a pending move, the copy reads that move's source.
        self.saves[slot] = self.copies.get(block, block)
        self._counters.saved += 1

    def copy(self, block: int, new: int) -> None:
        """Records a copy of a device block to another one."""
        self.copies[new] = self.copies.get(block, block)
        self._counters.copied += 1

    def load(self, slot: int, block: int) -> None:
        """Records a copy of a host slot to a device block."""
        self.loads[block] = slot

    def evict(self, evictions: Evictions) -> None:
        """Records evictions from the blocks of some rows."""
        self.early_saves.append(self.saves)
        self.saves = {}
        self.evictions.append(evictions)
        self._counters.evicted += int((evictions.num_tokens - evictions.num_kept).sum())

    def take(self) -> Moves:
        """Returns the pending moves and clears them."""
        self._counters.loaded += len(self.loads)
        moves = Moves(
            _pairs((block, slot) for saves in self.all_saves for slot, block in saves.items()),
            _pairs((old, new) for new, old in self.copies.items()),
            _pairs((slot, block) for block, slot in self.loads.items()),
            self.evictions,
            np.cumsum([len(saves) for saves in self.early_saves], dtype=int).tolist(),
        )
        self.saves, self.copies, self.loads, self.evictions, self.early_saves = {}, {}, {}, [], []
        return moves


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    found = list(pairs)
    return np.array(found, np.int32) if found else _NO_PAIRS
