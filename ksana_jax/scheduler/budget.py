"""The remaining budget of a step: tokens and query tiles."""

from __future__ import annotations

import dataclasses

from ksana_jax.step.contract import Part


@dataclasses.dataclass
class StepBudget:
    """The remaining tokens of a step, and its remaining query tiles for rows that compute more than one token.

    tiles: number of free tiles of each width, the widest first. All tiles of a step have one width: the widest of which
      there are enough for its chunks.
    """

    tokens: int
    tiles: list[Part]

    def most(self, left: int) -> int:
        """Returns how many of a row's `left` tokens fit."""
        if left == 1:
            return min(self.tokens, 1)
        wide, *narrow = [part.count * part.width for part in self.tiles]
        if wide > 0:
            return min(left, self.tokens, wide)
        # A chunk that is cut anyway waits, rather than having the whole step read its keys for fewer queries at once.
        return left if any(left <= min(self.tokens, tokens) for tokens in narrow) else 0

    def take(self, count: int) -> None:
        """Deducts the tokens and tiles of a row that computes `count` tokens."""
        self.tokens -= count
        if count > 1:
            self.tiles = [Part(free - -(-count // width), width) for free, width in self.tiles]
