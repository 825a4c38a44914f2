"""Tries that requests share, one for each cache salt, within a number of nodes."""

from __future__ import annotations

from ksana_jax.methods.proposers.tries import Cursor, Trie

# Tries that are kept; the one that was used longest ago goes first.
MAX_SALTS = 256


class SharedTries:
    """Tries by salt; texts of different salts never meet.

    Args:
      depth: of each trie. max_nodes: of all of them, after `shrink`.
    """

    def __init__(self, depth: int, max_nodes: int):
        self.depth, self.max_nodes = depth, max_nodes
        self._tries: dict[str, Trie] = {}  # the one used last comes last

    def cursor(self, salt: str) -> Cursor:
        """Returns a cursor for a text of a salt."""
        trie = self._tries.pop(salt, None) or Trie(self.depth)
        self._tries[salt] = trie
        if len(self._tries) > MAX_SALTS:
            del self._tries[next(iter(self._tries))]
        return Cursor(trie)

    @property
    def num_nodes(self) -> int:
        return sum(trie.num_nodes for trie in self._tries.values())

    def shrink(self) -> None:
        """Halves counts, beginning with the salt that was used longest ago, until there are at most max_nodes nodes."""
        while self.num_nodes > self.max_nodes:
            for trie in self._tries.values():
                trie.halve()
                if self.num_nodes <= self.max_nodes // 2:
                    break
