"""The changes made by the tokens of a step, for reporting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ksana_jax.sequence import Sequence


class StepResult(NamedTuple):
    """Changes that the tokens of a step made.

    rows, tokens: rows that got tokens, and the token of each; with drafts [n, w], of which the first counts [n] count.
    finished: all sequences that ended.
    beams: rows that have computed all their tokens and whose request chooses the next one.
    live_blocks: blocks in use when no token was left to see others, before sequences that ended released theirs.
    counts: number of each row's new tokens; None where it is 1.
    """

    rows: np.ndarray
    tokens: np.ndarray
    finished: list[Sequence]
    beams: np.ndarray
    live_blocks: int
    counts: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all rows."""
        return len(self.tokens) if self.counts is None else int(self.counts.sum())

    def run(self, nth: int) -> list[int]:
        """Returns the new tokens of the row at an index of `rows`."""
        return [int(self.tokens[nth])] if self.counts is None else self.tokens[nth, : self.counts[nth]].tolist()

    def shorten(self, nth: int, count: int) -> None:
        """Drops all but the first `count` new tokens of the row at an index of `rows`."""
        if self.counts is not None:
            self.counts[nth] = count
