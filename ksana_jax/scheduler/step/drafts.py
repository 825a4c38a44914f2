"""Draft tokens of the rows of a step. NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = Any  # NumPy on the host, jax inside a compiled step


class FlatDrafts(NamedTuple):
    """Runs of draft tokens, by the tokens of a step that verifies them.

    following: [J] int32, the draft token after each of the step's sampled tokens; -1 for none.
    rollback: see `Drafts`.
    """

    following: Array
    rollback: Array | None


class Drafts(NamedTuple):
    """Tokens that may follow the newest one of each of n rows: one run of them, or the nodes of a tree.

    Args:
      ids: [n, K] int32; values beyond a row's count are ignored.
      counts: [n] int32, number of drafts of each row.
      drawn_from: [at least K, at least n, V] on the device, the distribution that each token was drawn from; None if
        the proposer does not sample.
      rollback: [] float32, threshold of the rule "bild", see `good_enough`; None with other rules.
      parents: [n, K] int32, the index of each draft token's parent, below its own; -1 where it follows the
        row's newest token. None where each follows the previous one.
      sampled: [n, at least K + 1], set by the step: tokens that the model sampled after the newest token and each draft
        token; -1 without finite scores.
    """

    ids: Array
    counts: Array
    drawn_from: Array | None = None
    rollback: Array | None = None
    parents: Array | None = None
    sampled: np.ndarray | None = None

    def shortened(self, most: np.ndarray) -> Drafts:
        """Returns drafts of at most `most` [n] tokens, without parents if they do not branch."""
        found = self._replace(counts=np.minimum(self.counts, np.maximum(most, 0)))
        return found if found.branches else found._replace(parents=None)

    @property
    def branches(self) -> bool:
        """True if a token follows another one than the previous one."""
        if self.parents is None:
            return False
        nth = np.arange(self.ids.shape[1])
        return bool(np.count_nonzero((self.parents != nth - 1) & (nth < self.counts[:, None])))

    def with_parents(self) -> Drafts:
        """Returns the same drafts with parents, of runs too."""
        if self.parents is not None:
            return self
        return self._replace(parents=np.tile(np.arange(-1, self.ids.shape[1] - 1, dtype=np.int32), (len(self.ids), 1)))

    def flat(self, count: int) -> FlatDrafts:
        """Returns runs of draft tokens as a step of `count` tokens has them, of each row one more than of ids."""
        rows, most = self.ids.shape
        following = np.full(count, -1, np.int32)
        of_rows = following[: rows * (most + 1)].reshape(rows, most + 1)
        of_rows[:, :most] = np.where(np.arange(most) < self.counts[:, None], self.ids, -1)
        return FlatDrafts(following, self.rollback)

    def runs(self, row: int) -> list[np.ndarray]:
        """Returns the draft tokens of a row on the path to its newest token, which are none, and to each draft token,
        itself included."""
        found = [np.zeros(0, np.int32)]
        for i in range(int(self.counts[row])):
            before = i if self.parents is None else int(self.parents[row, i]) + 1
            found.append(np.append(found[before], self.ids[row, i]))
        return found

    def depths(self) -> np.ndarray:
        """Returns how far [n, K] each token is from the row's newest one: 1 if it follows that."""
        return self.ancestry()[1]

    def ancestry(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the path to each token, and its length.

        Returns:
          [n, K] int32 whose bit 0 stands for the row's newest token and bit i + 1 for draft token i, set for each token
          on the path, the token itself included; and [n, K] depths.
        """
        rows, count = np.arange(len(self.ids)), self.ids.shape[1]
        ways, depths = np.ones((len(rows), 1 + count), np.uint32), np.zeros((len(rows), 1 + count), np.int32)
        for i in range(count):
            before = np.full(len(rows), i) if self.parents is None else np.clip(self.parents[:, i] + 1, 0, i)
            ways[:, i + 1] = ways[rows, before] | np.uint32(1 << (i + 1))
            depths[:, i + 1] = depths[rows, before] + 1
        return ways[:, 1:].view(np.int32), depths[:, 1:]
