"""Trees of draft tokens while proposers put them together. Knows no texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ksana_jax.step.drafts import Drafts

# The place of a row's newest token.
AFTER_TEXT = -1


class DraftTree:
    """The draft of one row. What follows a token twice is in it once.

    Args:
      room: most tokens.

    Attributes:
      ids, parents: tokens, and for each the place of the one that it follows, or AFTER_TEXT.
    """

    __slots__ = ("_places", "ids", "parents", "room")

    def __init__(self, room: int):
        self.room = room
        self.ids: list[int] = []
        self.parents: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        return len(self.ids) >= self.room

    def add(self, parent: int, token: int) -> int | None:
        """Adds a token after that at a place; returns its own place, or None where there is no room."""
        place = self._places.get((parent, token))
        if place is None:
            if self.is_full:
                return None
            place = self._places[parent, token] = len(self.ids)
            self.ids.append(token)
            self.parents.append(parent)
        return place

    def add_run(self, tokens: Iterable[int]) -> None:
        """Adds tokens that follow each other, the first of them after the row's newest one, as far as there is room."""
        place: int | None = AFTER_TEXT
        for token in tokens:
            if (place := self.add(place, token)) is None:
                return

    def set_run(self, tokens: Iterable[int]) -> None:
        """Makes the draft a run without branches, to which nothing will be added."""
        self.ids = list(itertools.islice(tokens, self.room))
        self.parents = list(range(-1, len(self.ids) - 1))


def drafts_of(trees: Sequence[DraftTree]) -> Drafts:
    """Returns the drafts of rows."""
    width = max((len(tree.ids) for tree in trees), default=0)
    ids, parents = np.zeros((len(trees), width), np.int32), np.zeros((len(trees), width), np.int32)
    for row, tree in enumerate(trees):
        ids[row, : len(tree.ids)], parents[row, : len(tree.ids)] = tree.ids, tree.parents
    return Drafts(ids, np.array([len(tree.ids) for tree in trees], np.int32), parents=parents)
