"""The pool of a light server: blocks that rows hold, and cached prefixes in the order of their last use.

A prefix is a chain of hashes, one for each full block of a prompt; block number i of a prompt stands for all of it up
to its end. Knows no requests, no time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(eq=False)
class Held:
    """Blocks of one row. chain: cached ones that it uses. private: others; a fraction while its answer grows."""

    chain: list[Hashable] = dataclasses.field(default_factory=list)
    private: float = 0.0


class LightCache:
    """Counts the blocks of one server's pool.

    Args:
      num_blocks: in the pool. caching: whether unused blocks are kept for their content.
    """

    def __init__(self, num_blocks: int, caching: bool):
        self.num_blocks, self.caching = num_blocks, caching
        self.private = 0.0
        self._users: dict[Hashable, int] = {}
        self._idle: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
        self._coming: set[Hashable] = set()

    @property
    def available(self) -> float:
        """Number of unused blocks, including cached ones, which can be evicted."""
        return self.num_blocks - self.private - len(self._users) + len(self._idle)

    def match(self, chain: Sequence[Hashable]) -> int:
        """Returns the number of leading blocks that are cached."""
        users, found = self._users, 0
        for name in chain:
            if name not in users:
                break
            found += 1
        return found

    def awaits(self, chain: Sequence[Hashable], matched: int) -> bool:
        """True if the first block that is not cached is being computed."""
        return matched < len(chain) and chain[matched] in self._coming

    def num_idle(self, chain: Sequence[Hashable]) -> int:
        """Number of unused cached blocks of a chain; using them reduces the available blocks."""
        return sum(name in self._idle for name in chain)

    def take(self, chain: Sequence[Hashable], matched: int, private: int) -> Held:
        """Gives a new row its cached prefix and `private` blocks; its other full blocks are being computed from now."""
        held = Held()
        self._use(chain[:matched], held)
        self.grow(held, private)
        if self.caching:
            self._coming.update(chain[matched:])
        return held

    def grow(self, held: Held, num_blocks: float) -> None:
        """Gives a row more blocks."""
        held.private += num_blocks
        self.private += num_blocks
        self._make_room()

    def computed(self, held: Held, chain: Sequence[Hashable]) -> None:
        """Marks all blocks of a chain as computed by a row: other rows may use them."""
        if not self.caching:
            return
        new = chain[len(held.chain) :]
        self._coming.difference_update(new)
        self._use(new, held)
        freed = min(len(new), held.private)
        held.private -= freed
        self.private -= freed
        self._make_room()

    def give_back(self, held: Held, chain: Sequence[Hashable] = ()) -> None:
        """Releases a row's blocks; the last of a chain are replaced first. chain: that it was computing."""
        self._coming.difference_update(chain)
        self.private -= held.private
        users, idle = self._users, self._idle
        for name in reversed(held.chain):
            users[name] = left = users[name] - 1
            if not left:
                idle[name] = None
        held.chain, held.private = [], 0.0

    def _use(self, names: Sequence[Hashable], held: Held) -> None:
        users, idle = self._users, self._idle
        for name in names:
            if count := users.get(name, 0):
                users[name] = count + 1
            else:
                users[name] = 1
                idle.pop(name, None)
        held.chain += names

    def _make_room(self) -> None:
        while self._idle and self.private + len(self._users) > self.num_blocks:
            name, _ = self._idle.popitem(last=False)
            del self._users[name]
