"""Time that may be lost: a small share of all time, and what was gained. Knows no steps."""

from __future__ import annotations

# What may be saved up of shares of the time, and what gains may add, in plain steps.
MOST_SAVED, MOST_GAINED = 16, 128


class Allowance:
    """Seconds that may still be lost.

    Args:
      share: of the time that may be lost. first: plain steps that may be at first.

    Attributes:
      left_s: None until it is known how long a plain step takes; negative if more was lost.
      passed_s: of which a share was added.
    """

    def __init__(self, share: float, first: int):
        self._share, self._first = share, first
        self.left_s: float | None = None
        self.passed_s = 0.0

    def pass_time(self, seconds: float, plain_s: float) -> None:
        """Adds the share of some time. plain_s: seconds of a plain step."""
        self.passed_s += seconds
        self._add(self._share * seconds, MOST_SAVED, plain_s)

    def lose(self, seconds: float) -> None:
        """Books a loss."""
        if self.left_s is not None:
            self.left_s -= seconds

    def gain(self, seconds: float, plain_s: float) -> None:
        """Books a gain, or a loss if it is negative."""
        self._add(seconds, MOST_GAINED, plain_s)

    def _add(self, seconds: float, most: int, plain_s: float) -> None:
        if self.left_s is None:
            self.left_s = self._first * plain_s
        self.left_s = min(self.left_s + seconds, max(most * plain_s, self.left_s))

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be lost now."""
        return self.left_s is None or self.left_s <= 0
