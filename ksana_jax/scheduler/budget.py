"""Tokens and query tiles that are left of a step."""

from __future__ import annotations

import dataclasses

from ksana_jax.step.contract import Part


@dataclasses.dataclass
class StepBudget:
    """What is left of a step: tokens, and query tiles for rows that compute more than one.

    tiles: how many there would be of each width, the widest first. All tiles of a step have one width: the widest that
      holds its chunks.
    """

    tokens: int
    tiles: list[Part]

    def most(self, left: int) -> int:
        """How many of a row's `left` tokens fit."""
        if left == 1:
            return min(self.tokens, 1)
        wide, *narrow = [part.count * part.width for part in self.tiles]
        if wide > 0:
            return min(left, self.tokens, wide)
        # A chunk that is cut anyway waits, rather than having the whole step read its keys for fewer queries at once.
        return left if any(left <= min(self.tokens, tokens) for tokens in narrow) else 0

    def take(self, count: int) -> None:
        """Uses up what a row of `count` tokens needs."""
        self.tokens -= count
        if count > 1:
            self.tiles = [Part(free - -(-count // width), width) for free, width in self.tiles]
