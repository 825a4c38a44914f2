"""Tries that requests share, one for each cache salt, within a number of nodes."""

from __future__ import annotations

from ksana_jax.methods.proposers.tries import Cursor, Trie

# Maximum number of tries; the least recently used is dropped first.
MAX_SALTS = 256


class SharedTries:
    """Tries by salt; sequences of different salts never meet.

    Args:
      depth: of each trie. max_nodes: of all of them, after `shrink`.
    """

    def __init__(self, depth: int, max_nodes: int):
        self.depth, self.max_nodes = depth, max_nodes
        self._tries: dict[str, Trie] = {}  # the most recently used comes last

    def cursor(self, salt: str) -> Cursor:
        """Returns a cursor for a sequence of a salt."""
        trie = self._tries.pop(salt, None) or Trie(self.depth)
        self._tries[salt] = trie
        if len(self._tries) > MAX_SALTS:
            del self._tries[next(iter(self._tries))]
        return Cursor(trie)

    @property
    def num_nodes(self) -> int:
        return sum(trie.num_nodes for trie in self._tries.values())

    def shrink(self) -> None:
        """Halves counts, from the least recently used salt on, until at most max_nodes nodes are left."""
        while self.num_nodes > self.max_nodes:
            for trie in self._tries.values():
                trie.halve()
                if self.num_nodes <= self.max_nodes // 2:
                    break
