"""Trees of draft tokens while proposers build them. Knows no sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ksana_jax.scheduler.step.drafts import Drafts

# The index of a row's newest token.
AFTER_TEXT = -1


class DraftTree:
    """The draft of one row. Equal tokens after one parent are stored once.

    Args:
      room: maximum tokens.

    Attributes:
      ids, parents: tokens, and the index of each one's parent, or AFTER_TEXT.
    """

    __slots__ = ("_places", "ids", "parents", "room")

    def __init__(self, room: int):
        self.room = room
        self.ids: list[int] = []
        self.parents: list[int] = []
        self._places: dict[int, int] = {}  # by parent and token

    @property
    def is_full(self) -> bool:
        return len(self.ids) >= self.room

    def add(self, parent: int, token: int) -> int | None:
        """Adds a token after the one at an index; returns its own index, or None without room."""
        key = parent << 32 | token
        place = self._places.get(key)
        if place is None:
            ids = self.ids
            if (place := len(ids)) >= self.room:
                return None
            self._places[key] = place
            ids.append(token)
            self.parents.append(parent)
        return place

    def add_run(self, tokens: Iterable[int]) -> None:
        """Adds tokens that follow each other, the first of them after the row's newest one, as far as room allows."""
        place: int | None = AFTER_TEXT
        for token in tokens:
            if (place := self.add(place, token)) is None:
                return

    def run_to(self, place: int) -> list[int]:
        """Returns the tokens on the path to an index, its own included."""
        found = []
        while place != AFTER_TEXT:
            found.append(self.ids[place])
            place = self.parents[place]
        return found[::-1]

    def set_run(self, tokens: list[int]) -> None:
        """Makes the draft a run without branches, of at most `room` tokens, to which nothing will be added."""
        self.ids, self.parents = tokens, list(range(-1, len(tokens) - 1))


def drafts_of(trees: Sequence[DraftTree]) -> Drafts:
    """Returns the drafts of rows."""
    counts = np.array([len(tree.ids) for tree in trees], np.int32)
    width = int(counts.max(initial=0))
    nothing = [0] * width
    # All rows at once, which takes a third of the time of row by row.
    ids, parents = (
        np.array(list(itertools.chain.from_iterable(lists)), np.int32).reshape(len(trees), width)
        for lists in (
            [tree.ids + nothing[len(tree.ids) :] for tree in trees],
            [tree.parents + nothing[len(tree.ids) :] for tree in trees],
        )
    )
    return Drafts(ids, counts, parents=parents)
