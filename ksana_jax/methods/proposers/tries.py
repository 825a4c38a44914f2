"""Tries of token runs with counts, and cursors that put a growing sequence into one. Lists of integers and one dict.

A node is an integer, 0 for the root: objects would be visited by Python's garbage collector, which takes longer than
all that is done with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

ROOT = 0
_TOKEN_BITS = 32


class Trie:
    """Runs of up to `depth` tokens that occurred in sequences.

    Attributes:
      counts: occurrences of each node's run in sequences. tokens: the last token of each. best: the child of each with
        the highest count, among equals the one counted last. newest: the newest child of each. older: for each, the
        next older child of its parent. 0 for none.
      generation: how often nodes were removed, after which cursors start again.
    """

    def __init__(self, depth: int):
        self.depth, self.generation = depth, 0
        self.counts, self.tokens, self.best = [0], [0], [0]
        self.newest, self.older = [0], [0]
        self._children: dict[int, int] = {}  # node and token; nodes in the order of their numbers

    @property
    def num_nodes(self) -> int:
        """Number of runs."""
        return len(self._children)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Returns the node of a run with a continuation in some sequence; None without one."""
        node, children = ROOT, self._children
        for token in tokens:
            found = children.get(node << _TOKEN_BITS | token)
            if found is None:
                return None
            node = found
        return node if self.best[node] else None

    def children(self, node: int) -> Iterator[int]:
        """Yields the nodes of the runs that are a token longer."""
        child = self.newest[node]
        while child:
            yield child
            child = self.older[child]

    def continued(self, node: int, run: list[int]) -> tuple[int, list[int]]:
        """Returns a run and its node; a run of the maximum length has no children and is replaced by its second half,
        which has some, or by ROOT."""
        if len(run) >= self.depth:
            run = run[len(run) - self.depth // 2 :]
            node = self.find(run) or ROOT
        return node, run

    def branch(self, node: int, run: list[int]) -> Iterator[tuple[int, float]]:
        """Yields the most frequent tokens after a run, one after the other, and the share of sequences that continued
        so.

        Args:
          node: of the run.
        """
        run, best, counts, tokens = run.copy(), self.best, self.counts, self.tokens
        while True:
            if len(run) >= self.depth:
                node, run = self.continued(node, run)
            if node == ROOT or not (child := best[node]):
                return
            token = tokens[child]
            yield token, counts[child] / counts[node]
            node = child
            run.append(token)

    def best_branch(self, node: int, run: list[int], most: int) -> list[int]:
        """Returns the first tokens, at most `most`, that `branch` yields."""
        best, tokens, depth, found, length = self.best, self.tokens, self.depth, [], len(run)
        while len(found) < most:
            if length >= depth:
                node, cut = self.continued(node, [*run, *found])
                length = len(cut)
            if node == ROOT or not (child := best[node]):
                break
            found.append(tokens[child])
            node = child
            length += 1
        return found

    def extend(self, nodes: list[int], tokens: Iterable[int]) -> list[int]:
        """Counts tokens that follow each other after each of some runs.

        Args:
          nodes: of the runs at the end of a sequence, the longest first: runs of 0 to at most depth - 1 tokens.

        Returns:
          The nodes of the runs at the end of the longer sequence.
        """
        children, counts, best, of_tokens = self._children, self.counts, self.best, self.tokens
        newest, older, depth, find = self.newest, self.older, self.depth, self._children.get
        for token in tokens:
            found = []
            for node in nodes:
                key = node << _TOKEN_BITS | token
                child = find(key)
                if child is None:
                    child = children[key] = len(counts)
                    count = 1
                    counts.append(1)
                    of_tokens.append(token)
                    best.append(0)
                    older.append(newest[node])
                    newest.append(0)
                    newest[node] = child
                else:
                    count = counts[child] = counts[child] + 1
                if count >= counts[best[node]]:  # the root's is 0
                    best[node] = child
                found.append(child)
            found.append(ROOT)
            nodes = found if len(found) <= depth else found[1:]
        return nodes

    def follow(self, nodes: list[int], tokens: Iterable[int], most: int) -> list[int]:
        """Returns the same as `extend`, for existing runs of at most `most` tokens, and counts nothing."""
        find = self._children.get
        for token in tokens:
            found = [ROOT]
            for node in nodes[: -1 - most : -1]:  # from the shortest on; the ends of an existing run exist
                if (child := find(node << _TOKEN_BITS | token)) is None:
                    break
                found.append(child)
            nodes = found[::-1]
        return nodes

    def halve(self) -> None:
        """Halves all counts, and removes the runs that sequences had once."""
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
        self.newest, self.older = newest.tolist(), older.tolist()
        self._children = dict(zip(keys[1:].tolist(), range(1, len(keys)), strict=True))
        self.generation += 1


class Cursor:
    """Puts all runs of a sequence that grows into a trie."""

    def __init__(self, trie: Trie):
        self.trie, self._nodes, self._generation = trie, [ROOT], trie.generation

    def put(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the end of the sequence."""
        self._nodes = self.trie.extend(self.nodes, tokens)
        self._generation = self.trie.generation

    @property
    def nodes(self) -> list[int]:
        """The nodes of the runs at the end of the sequence, the longest first, of 0 to at most depth - 1 tokens; fewer
        after nodes were removed."""
        return self._nodes if self._generation == self.trie.generation else [ROOT]
