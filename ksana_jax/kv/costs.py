"""What computing a token and moving a block cost, as measured: to choose between swapping and computing again."""

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
        """Learns from a step.

        Args:
          num_tokens: computed in it, if chunks were among them; 0 otherwise: a decode step says little of a prompt.
          step_s: seconds of the step, its moves included. move_s: of the moves alone; 0 where that is not known.
        """
        if moves is not None and move_s:
            self._block_s.append(move_s / (len(moves.saves) + len(moves.copies) + len(moves.loads)))
        if num_tokens and (moves is None or move_s):
            self._token_s.append((step_s - move_s) / num_tokens)

    def favour_moving(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving blocks takes less time than computing tokens; yes as long as one is unknown, to learn it."""
        if not self._block_s or not self._token_s:
            return True
        # Medians: a step that compiled took seconds.
        return num_blocks * median(self._block_s) < num_tokens * median(self._token_s)
