"""A warpgroup that makes operands for the others of its block, and when each side waits for the other."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.speed.sass import Instruction

STAGES = 2  # of `hopper.prefill`


class Supply:
    """Keys and values that one warpgroup of a block widens for the others.

    A turn of it makes the keys of piece n + 1, then the values of piece n, each of which ends with a fence; a turn of
    the others multiplies the keys of piece n and the values of piece n - 1, and has read them when it has waited for
    its first and its last product. STAGES of each fit.
    """

    def __init__(self, turn: Sequence[Instruction], made: Sequence[Instruction]):
        waits = [n for n, i in enumerate(turn) if i.opcode.startswith("WARPGROUP.DEPBAR")]
        fences = [n for n, i in enumerate(made) if i.name == "FENCE"]
        self._read_keys, self._read_values = (waits[0], waits[-1]) if waits else (0, 0)
        self._begins_values = fences[-2] + 1 if len(fences) > 1 else 0

    def may_make(self, at: int, turns: int, others: Sequence[tuple[int, int]]) -> bool:
        """True if the instruction `at` may follow after `turns` whole turns; others: at, turns of each of them."""
        if at not in (0, self._begins_values):
            return True
        keys = at == 0
        read = self._read_keys if keys else self._read_values
        done = min((n + (there > read) for there, n in others), default=turns)
        return done > turns - STAGES

    def may_read(self, at: int, turns: int, maker: tuple[int, int]) -> bool:
        """True if the instruction `at` of another one may follow after `turns` whole turns; maker: its at, turns."""
        return at != 0 or maker[1] >= turns
