"""Index of the servers' caches: block hash -> set of servers, as the bits of an int.

Servers report their caches in events, or they are guessed from sent prompts: the blocks of a prompt are
expected to stay for a time, the most recent ones up to a capacity.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ksana_jax.serve.router.events import DEVICE, STATES, AllBlocksCleared, BlockRemoved, BlockStored, Event
from ksana_jax.serve.router.request import Hash

# Seconds between searches for expired expected blocks.
SWEEP_S = 1.0
# Up to this number of servers, bits are looked at one by one; more are unpacked together.
FEW = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """The part of a prompt that each server caches.

    levels: (num_blocks, servers): bits of the servers that can reuse the first num_blocks blocks and no more, in
    ascending order of num_blocks. Servers in none of them have nothing.
    """

    levels: Sequence[tuple[int, int]] = ()

    @property
    def longest(self) -> int:
        """Blocks that the best server has."""
        return self.levels[-1][0] if self.levels else 0

    def of(self, server: int) -> int:
        """Blocks that one server has."""
        return next((blocks for blocks, servers in self.levels if servers >> server & 1), 0)

    def fill(self, found: np.ndarray, values: Sequence[float]) -> None:
        """Sets found, [S], at the servers of each level to the level's value."""
        for (_, servers), value in zip(self.levels, values, strict=True):
            if servers.bit_count() > FEW:
                found[unpacked(servers, len(found))] = value
                continue
            while servers:
                number = servers.bit_length() - 1
                found[number] = value
                servers ^= 1 << number

    def servers_with_more(self, num_blocks: int) -> int:
        """Returns the bits of the servers that have more than num_blocks."""
        found = 0
        for blocks, servers in reversed(self.levels):
            if blocks <= num_blocks:
                break
            found |= servers
        return found


def unpacked(servers: int, num_servers: int) -> np.ndarray:
    """Returns which servers are in a set of bits, [S] bool."""
    packed = np.frombuffer(servers.to_bytes((num_servers + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=num_servers, bitorder="little").view(bool)


def numbers_of(servers: int) -> list[int]:
    """Returns the numbers in a set of few bits, descending."""
    found = []
    while servers:
        number = servers.bit_length() - 1
        found.append(number)
        servers ^= 1 << number
    return found


@dataclasses.dataclass(slots=True)
class _Cache:
    """One server's blocks. expected: hash -> expiry time, least recently sent first. stored: hash -> media.

    states: hash of the text before the state -> media. state_group: `group_idx` of states; None without any.
    """

    expected: collections.OrderedDict[Hash, float] = dataclasses.field(default_factory=collections.OrderedDict)
    stored: dict[Hash, set[str]] = dataclasses.field(default_factory=dict)
    states: dict[Hash, set[str]] = dataclasses.field(default_factory=dict)
    state_group: int | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.expected) + len(self.stored)


class CacheIndex:
    """Finds the servers that cache a prompt's leading blocks.

    Args:
      ttl_s: seconds for which a block that was sent is expected to be cached, unless it is sent again.

    Attributes:
      num_blocks: known or expected cached blocks of each server, [S]. capacity: its maximum, [S].
    """

    def __init__(self, ttl_s: float = 120.0):
        self.ttl_s = ttl_s
        self._holders: dict[Hash, int] = {}  # the servers that have a block, as bits
        self._slow: dict[Hash, int] = {}  # of those, servers that have the block on slower media only
        self._states: dict[Hash, int] = {}  # the servers that have the state after a block
        self._recurrent = 0  # the servers that have recurrent layers
        self._caches: list[_Cache] = []
        self._swept_s = -math.inf
        self.num_blocks, self.capacity = np.zeros(0), np.zeros(0)

    def __len__(self) -> int:
        return len(self._holders)

    def grow(self) -> None:
        """Adds a server."""
        self._caches.append(_Cache())
        self.num_blocks, self.capacity = np.append(self.num_blocks, 0.0), np.append(self.capacity, np.inf)

    def match(self, hashes: Sequence[Hash]) -> Match:
        """Finds how many leading blocks of a prompt each server can reuse.

        A server with a block is assumed to have the blocks before it, because caches evict ends first. One with
        recurrent layers continues at a state: blocks that are only expected have none.
        """
        holders, known, found = self._holders, 0, []
        all_servers = holders.get(hashes[0], 0) if hashes else 0
        at = bisect.bisect_left(hashes, True, key=lambda block: block not in holders)
        while at and known != all_servers:
            servers = holders.get(hashes[at - 1], 0)
            if more := servers & ~known:
                found.append((at, more))
                known |= more
                all_servers |= more
            at -= 1
        return Match(self._until_states(hashes, found) if self._recurrent else found[::-1])

    def _until_states(self, hashes: Sequence[Hash], found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the levels of a match from those without states, which are in descending order."""
        levels, blocks_of, without = [], dict(found), 0
        for at in range(found[0][0] if found else 0, 0, -1):
            servers = blocks_of.get(at, 0)
            without |= servers & self._recurrent
            have = without & self._states.get(hashes[at - 1], 0)
            without ^= have
            if servers := servers & ~self._recurrent | have:
                levels.append((at, servers))
        return levels[::-1]

    def num_matched(self, server: int, hashes: Sequence[Hash]) -> int:
        """Returns how many leading blocks of a prompt one server can reuse, as `match` does."""
        cache = self._caches[server]
        expected, stored = cache.expected, cache.stored
        count = bisect.bisect_left(hashes, True, key=lambda found: found not in expected and found not in stored)
        while count and cache.state_group is not None and hashes[count - 1] not in cache.states:
            count -= 1
        return count

    @property
    def has_slow(self) -> bool:
        """True if any server has blocks on slower media only."""
        return bool(self._slow)

    def num_slow(self, hashes: Sequence[Hash], match: Match) -> dict[int, int]:
        """Returns how many blocks of a match each server has on slower media only, for servers with any."""
        found: dict[int, int] = {}
        get = self._slow.get
        for at in range(match.longest):
            servers = get(hashes[at], 0)
            while servers:
                number = servers.bit_length() - 1
                servers ^= 1 << number
                if at < match.of(number):
                    found[number] = found.get(number, 0) + 1
        return found

    def expect(self, server: int, hashes: Sequence[Hash], now: float) -> None:
        """Records that a prompt is sent to a server, which will cache its blocks unless its events contradict."""
        cache, until = self._caches[server], now + self.ttl_s
        expected, stored = cache.expected, cache.stored
        # The start of a text counts as most recent, so that its end is evicted first, and the rest is a prefix.
        for found in reversed(hashes):
            if found in expected:
                expected.move_to_end(found)
                expected[found] = until
            elif found not in stored:
                expected[found] = until
                self._holders[found] = self._holders.get(found, 0) | 1 << server
        self._fit(server)

    def sweep(self, now: float) -> None:
        """Drops expired blocks; looks for them once a second at most."""
        if now - self._swept_s < SWEEP_S:
            return
        self._swept_s = now
        for server, cache in enumerate(self._caches):
            expected, over = cache.expected, []
            while expected and next(iter(expected.values())) <= now:
                over.append(expected.popitem(last=False)[0])
            self._drop(1 << server, over)
            self.num_blocks[server] = cache.num_blocks

    def clear(self, server: int) -> None:
        """Forgets all blocks of a server."""
        cache = self._caches[server]
        self._drop(1 << server, (*cache.expected, *reversed(cache.stored)))  # ends first
        for found in cache.states:
            _remove(self._states, found, 1 << server)
        self._recurrent &= ~(1 << server)
        self._caches[server] = _Cache()
        self.num_blocks[server] = 0

    def apply(self, server: int, events: Iterable[Event]) -> None:
        """Applies events of a server, in their order; a server begins with AllBlocksCleared, and what it has."""
        for event in events:
            self._apply(server, event)
        self._fit(server)

    def _apply(self, server: int, event: Event) -> None:
        cache, bit = self._caches[server], 1 << server
        if isinstance(event, AllBlocksCleared):
            return self.clear(server)
        if isinstance(event, BlockStored) and event.kv_cache_spec_kind == STATES:
            cache.state_group = event.group_idx
            self._recurrent |= bit
        if event.group_idx is not None and event.group_idx == cache.state_group:
            return self._apply_to_states(cache, bit, event)
        if isinstance(event, BlockStored):
            for found in event.block_hashes:
                cache.expected.pop(found, None)
                media = cache.stored.setdefault(found, set())
                media.add(event.medium)
                self._holders[found] = self._holders.get(found, 0) | bit
                self._set_slow(found, bit, DEVICE not in media)
        else:
            for found in event.block_hashes:
                media = cache.stored.get(found)
                if media is None:
                    continue
                media.discard(event.medium)
                if media:
                    self._set_slow(found, bit, DEVICE not in media)
                else:
                    del cache.stored[found]
                    self._drop(bit, (found,))
        return None

    def _apply_to_states(self, cache: _Cache, bit: int, event: BlockStored | BlockRemoved) -> None:
        for found in event.block_hashes:
            media = cache.states.setdefault(found, set())
            if isinstance(event, BlockStored):
                media.add(event.medium)
                self._states[found] = self._states.get(found, 0) | bit
            else:
                media.discard(event.medium)
            if not media:
                del cache.states[found]
                _remove(self._states, found, bit)

    def _fit(self, server: int) -> None:
        """Drops expected blocks that exceed a server's capacity, least recently sent first; counts its blocks."""
        cache = self._caches[server]
        over, expected = cache.num_blocks - self.capacity[server], cache.expected
        if over > 0:
            count = min(math.ceil(over), len(expected))
            self._drop(1 << server, [expected.popitem(last=False)[0] for _ in range(count)])
        self.num_blocks[server] = cache.num_blocks

    def _set_slow(self, found: Hash, bit: int, slow: bool) -> None:
        servers = self._slow.pop(found, 0)
        if servers := servers | bit if slow else servers & ~bit:
            self._slow[found] = servers

    def _drop(self, bit: int, blocks: Sequence[Hash]) -> None:
        if self._slow:
            for found in blocks:
                self._set_slow(found, bit, False)
        for found in blocks:
            _remove(self._holders, found, bit)


def _remove(holders: dict[Hash, int], found: Hash, bit: int) -> None:
    if servers := holders.pop(found, 0) & ~bit:
        holders[found] = servers
