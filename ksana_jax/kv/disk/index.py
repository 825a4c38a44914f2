"""Index of block files, and the order in which they are replaced. Knows keys and sizes; touches no file."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools

from ksana_jax.kv.disk.block_file import BlockFacts


@dataclasses.dataclass(eq=False, slots=True)
class BlockFile:
    """A file that exists or is about to be written.

    facts: None until its header is known. used: counter that rises with each use. size: bytes; None until it is stored.
    """

    key: bytes
    facts: BlockFacts | None
    used: int
    size: int | None = None


class BlockFiles:
    """All files of a tier. Not thread-safe.

    A block is useful only with all blocks before it, so the last block of a chain is removed first.
    """

    def __init__(self):
        self.by_key: dict[bytes, BlockFile] = {}
        self.unknown: dict[bytes, BlockFile] = {}  # found at the start, headers unread
        self.num_bytes = 0
        self._num_children: collections.Counter[bytes] = collections.Counter()
        self._heap: list[tuple[int, bytes]] = []
        self._uses = itertools.count()

    def add(self, key: bytes, facts: BlockFacts | None) -> BlockFile:
        """Adds a file that is about to be written; it cannot be replaced before it is stored."""
        file = self.by_key[key] = BlockFile(key, None, next(self._uses))
        if facts is None:
            self.unknown[key] = file
        else:
            self.learn(file, facts)
        return file

    def store(self, file: BlockFile, size: int) -> None:
        """Records that a file has been written, unless it was removed in the meantime."""
        if self.by_key.get(file.key) is file:
            file.size = size
            self.num_bytes += size
            self._consider(file)

    def learn(self, file: BlockFile, facts: BlockFacts) -> None:
        """Records the content of a file."""
        if file.facts is None and self.by_key.get(file.key) is file:
            file.facts = facts
            self.unknown.pop(file.key, None)
            self._num_children[facts.parent] += 1

    def use(self, file: BlockFile) -> None:
        file.used = next(self._uses)
        self._consider(file)

    def remove(self, file: BlockFile) -> None:
        """Removes a file from the index, if present."""
        if self.by_key.get(file.key) is not file:
            return
        del self.by_key[file.key]
        self.unknown.pop(file.key, None)
        if file.size is not None:
            self.num_bytes -= file.size
        if file.facts is not None:
            parent = file.facts.parent
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                if parent in self.by_key:
                    self._consider(self.by_key[parent])

    def victim(self) -> BlockFile | None:
        """Returns the file to replace next; None if every file is continued by another one, stored or pending."""
        while self._heap:
            used, key = self._heap[0]
            file = self.by_key.get(key)
            if file is not None and file.used == used and self._replaceable(file):
                return file
            heapq.heappop(self._heap)
        return None

    def _replaceable(self, file: BlockFile) -> bool:
        return file.size is not None and not self._num_children[file.key]

    def _consider(self, file: BlockFile) -> None:
        if self._replaceable(file):
            heapq.heappush(self._heap, (file.used, file.key))
            if len(self._heap) > 4 * len(self.by_key) + 64:  # mostly entries of files that were used again
                current = [f for f in self.by_key.values() if self._replaceable(f)]
                self._heap = [(f.used, f.key) for f in current]
                heapq.heapify(self._heap)
