"""Swaps blocks of preempted rows to the host and back, where that costs less than recomputation. No jax, no rows."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

from ksana_jax.kv.counters import Counters
from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.moves import Moves, PendingMoves


class Costs:
    """The last measurements of computing a token and of moving a block, in seconds."""

    def __init__(self):
        self._token_s: deque[float] = deque(maxlen=33)
        self._block_s: deque[float] = deque(maxlen=33)

    def observe(self, num_tokens: int, step_s: float, moves: Moves | None, move_s: float) -> None:
        """Records the times of a step.

        Args:
          num_tokens: tokens computed in the step if it had chunks, else 0: a decode step says little about prompts.
          step_s: seconds of the step, moves included. move_s: seconds of the moves alone; 0 if unknown.
        """
        # Evictions move tokens within blocks, and take time that says nothing about a block.
        if moves is not None and move_s and not moves.evictions:
            self._block_s.append(move_s / moves.num_moved)
        if num_tokens and (moves is None or move_s):
            self._token_s.append((step_s - move_s) / num_tokens)

    def moving_is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """True if moving blocks is cheaper than recomputing tokens, and until both costs have been measured."""
        if not self._block_s or not self._token_s:
            return True
        # Medians, because a step that compiled took seconds.
        return num_blocks * median(self._block_s) < num_tokens * median(self._token_s)


class Swap:
    """Moves blocks of preempted rows, which are not in the prefix index, between device and host.

    Args:
      moves: collects the copies.
      preempt: see `config.EngineConfig`. costs: compared by "auto".
    """

    def __init__(
        self, device: DeviceTier, host: HostTier, moves: PendingMoves, counters: Counters, *, preempt: str, costs: Costs
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
