"""Measured costs of computing a token and of moving a block, for the choice between swapping and recomputation."""

from __future__ import annotations

from collections import deque
from statistics import median

from ksana_jax.kv.moves import Moves


class Costs:
    """The last measurements, in seconds."""

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
            self._block_s.append(move_s / (len(moves.saves) + len(moves.copies) + len(moves.loads)))
        if num_tokens and (moves is None or move_s):
            self._token_s.append((step_s - move_s) / num_tokens)

    def moving_is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """True if moving blocks is cheaper than recomputing tokens, and until both costs have been measured."""
        if not self._block_s or not self._token_s:
            return True
        # Medians, because a step that compiled took seconds.
        return num_blocks * median(self._block_s) < num_tokens * median(self._token_s)
