"""Tries of token runs with counts, and cursors that put a growing text into one. Lists of integers and one dict.

A node is an integer, 0 for the root: objects would be visited by Python's garbage collector, which takes longer than
all that is done with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

ROOT = 0
_TOKEN_BITS = 32


class Trie:
    """Runs of up to `depth` tokens that texts had.

    Attributes:
      counts: how often texts had each node's run. tokens: the last token of each. best: the child of each with the
        highest count, of equals the one counted last; 0 if there is none.
      generation: how often nodes were removed, whereupon cursors start again.
    """

    def __init__(self, depth: int):
        self.depth, self.generation = depth, 0
        self.counts, self.tokens, self.best = [0], [0], [0]
        # The newest child of each node, and the next older child of its parent; 0 if there is none.
        self._newest, self._older = [0], [0]
        self._children: dict[int, int] = {}  # node and token; nodes in the order of their numbers

    @property
    def num_nodes(self) -> int:
        """Number of runs."""
        return len(self._children)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Returns the node of a run that some text continued; None if there is none."""
        node, children = ROOT, self._children
        for token in tokens:
            found = children.get(node << _TOKEN_BITS | token)
            if found is None:
                return None
            node = found
        return node if self.best[node] else None

    def children(self, node: int) -> Iterator[int]:
        """Yields the nodes of the runs that are a token longer."""
        child = self._newest[node]
        while child:
            yield child
            child = self._older[child]

    def continued(self, node: int, run: list[int]) -> tuple[int, list[int]]:
        """Returns a run and its node, for one of the greatest length, which has no children, its second half: that goes
        on, or is ROOT."""
        if len(run) >= self.depth:
            run = run[len(run) - self.depth // 2 :]
            node = self.find(run) or ROOT
        return node, run

    def branch(self, node: int, run: list[int]) -> Iterator[tuple[int, float]]:
        """Yields the most frequent tokens after a run, one after the other, and the share of texts that went on so.

        Args:
          node: of the run.
        """
        while True:
            node, run = self.continued(node, run)
            if node == ROOT:
                return
            if not (child := self.best[node]):
                return
            yield self.tokens[child], self.counts[child] / self.counts[node]
            node, run = child, [*run, self.tokens[child]]

    def extend(self, nodes: Iterable[int], token: int) -> list[int]:
        """Counts one token more after each of some runs; returns the nodes of the longer runs."""
        children, counts, best, found = self._children, self.counts, self.best, []
        newest, older = self._newest, self._older
        for node in nodes:
            key = node << _TOKEN_BITS | token
            child = children.get(key)
            if child is None:
                child = children[key] = len(counts)
                count = 1
                counts.append(1)
                self.tokens.append(token)
                best.append(0)
                newest.append(0)
                older.append(newest[node])
                newest[node] = child
            else:
                count = counts[child] = counts[child] + 1
            if count >= counts[best[node]] or not best[node]:
                best[node] = child
            found.append(child)
        return found

    def halve(self) -> None:
        """Halves all counts, and removes the runs that texts had once."""
        counts = np.array(self.counts) // 2
        # A run is counted whenever a longer one is, so the parents of those that stay do so too.
        stays = counts > 0
        stays[ROOT] = True
        keys = np.array([0, *self._children], np.int64)[stays]
        tokens = keys & ((1 << _TOKEN_BITS) - 1)
        parents = (np.cumsum(stays) - 1)[keys >> _TOKEN_BITS]
        counts = counts[stays]
        best = np.zeros(len(counts), np.int64)
        order = 1 + counts[1:].argsort(kind="stable")
        best[parents[order]] = order  # of several children the last one, which has the highest count
        self.counts, self.tokens, self.best = counts.tolist(), tokens.tolist(), best.tolist()
        keys = (parents << _TOKEN_BITS) | tokens
        siblings = 1 + parents[1:].argsort(kind="stable")
        newest, older = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
        newest[parents[siblings]] = siblings  # of several the last one
        same = parents[siblings[1:]] == parents[siblings[:-1]]
        older[siblings[1:]] = np.where(same, siblings[:-1], 0)
        self._newest, self._older = newest.tolist(), older.tolist()
        self._children = dict(zip(keys[1:].tolist(), range(1, len(keys)), strict=True))
        self.generation += 1


class Cursor:
    """Puts all runs of a text that grows into a trie."""

    def __init__(self, trie: Trie):
        self.trie, self._nodes, self._generation = trie, [ROOT], trie.generation

    def put(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the end of the text."""
        trie = self.trie
        # The newest runs, the longest first, which the next token extends: those of 0 to depth - 1 tokens.
        nodes = self._nodes if self._generation == trie.generation else [ROOT]
        for token in tokens:
            nodes = trie.extend(nodes, token)
            nodes.append(ROOT)
            if len(nodes) > trie.depth:
                del nodes[0]
        self._nodes, self._generation = nodes, trie.generation
