"""Blocks of preempted rows on the host: moved out instead of computed again, and moved back. No jax, no rows."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.costs import Costs
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.moves import PendingMoves


class Swap:
    """Moves blocks without content that others could find between device and host.

    Args:
      host: None swaps nothing.
      moves: where the copies are noted.
      preempt: see `config.EngineConfig`. costs: what "auto" compares.
    """

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier | None,
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
        """Whether measured costs decide."""
        return self._preempt == "auto" and self._host is not None

    def is_better(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a preempted row should move its blocks to the host rather than compute their tokens again."""
        if self._host is None or self._preempt == "recompute" or num_blocks > self._host.num_available:
            return False
        return self._preempt == "swap" or self._costs.favour_moving(2 * num_blocks, num_tokens)

    def move_out(self, ids: np.ndarray) -> np.ndarray:
        """Returns slots of the host [n] that will hold the content of blocks [n]; there is room."""
        assert self._host is not None
        slots = []
        for block in ids.tolist():
            slot = self._host.take_slot()
            assert slot is not None
            self._moves.save(block, slot)
            slots.append(slot)
        self._counters.swapped_out += len(slots)
        return np.array(slots, np.int32)

    def move_in(self, slots: np.ndarray) -> np.ndarray:
        """Returns blocks of the device [n] that will hold the content of slots [n], which are given back."""
        assert self._host is not None
        ids = self._device.allocate(len(slots))
        for slot, block in zip(slots.tolist(), ids.tolist(), strict=True):
            self._moves.load(slot, block)
        self._host.in_moves += slots.tolist()
        self._counters.swapped_in += len(slots)
        return ids

    def discard(self, slots: np.ndarray) -> None:
        """Gives the slots of a swapped row back, unread."""
        assert self._host is not None
        for slot in slots.tolist():
            self._moves.saves.pop(slot, None)
        self._host.release(slots)
