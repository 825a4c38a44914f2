"""Swaps blocks of preempted rows to the host and back, as an alternative to recomputation. No jax, no rows."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.costs import Costs
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.moves import PendingMoves


class Swap:
    """Moves blocks of preempted rows, which are not in the prefix index, between device and host.

    Args:
      moves: collects the copies.
      preempt: see `config.EngineConfig`. costs: compared by "auto".
    """

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        moves: PendingMoves,
        counters: Counters,
        *,
        preempt: str,
        costs: Costs,
    ):
        self._device, self._host, self._moves, self._counters = device, host, moves, counters
        self._preempt, self._costs = preempt, costs

    @property
    def weighs_costs(self) -> bool:
        """True if the choice depends on measured costs."""
        return self._preempt == "auto"

    def is_better(self, num_blocks: int, num_tokens: int) -> bool:
        """True if a preempted row should move its blocks to the host rather than recompute their tokens."""
        if self._preempt == "recompute" or num_blocks > self._host.pool.num_available:
            return False
        return self._preempt == "swap" or self._costs.moving_is_cheaper(2 * num_blocks, num_tokens)

    def move_out(self, ids: np.ndarray) -> np.ndarray:
        """Saves device blocks [n] to the host; returns their slots [n]. The caller has made sure of room."""
        slots = []
        for block in ids.tolist():
            slot = self._host.take_slot()
            assert slot is not None
            self._moves.save(block, slot)
            slots.append(slot)
        self._counters.swapped_out += len(slots)
        return np.array(slots, np.int32)

    def move_in(self, slots: np.ndarray) -> np.ndarray:
        """Loads host slots [n] into device blocks; returns the blocks [n] and releases the slots."""
        ids = self._device.allocate(len(slots))
        for slot, block in zip(slots.tolist(), ids.tolist(), strict=True):
            self._moves.load(slot, block)
        self._host.in_moves += slots.tolist()
        self._counters.swapped_in += len(slots)
        return ids

    def discard(self, slots: np.ndarray) -> None:
        """Releases the slots of a swapped row without loading them."""
        for slot in slots.tolist():
            for saves in self._moves.all_saves:
                saves.pop(slot, None)
        self._host.release(slots)
