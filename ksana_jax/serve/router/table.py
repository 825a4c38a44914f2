"""The table of prefixes: the servers assigned to each prefix, as many as its demand needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.request import Hash
from ksana_jax.serve.router.sketch import FrequentKeys, WindowedRate


@dataclasses.dataclass(eq=False)
class Prefix:
    """A prefix with dedicated servers.

    Attributes:
      key: hash of its last block. num_tokens: its length. configured: whether it was given, and stays.
      members: numbers of its servers. arrivals: requests per second. work: seconds of work per second that they bring.
      high_since, low_since: start of the time with too few or too many servers; None otherwise.
      servers: the same as bits.
      given: numbers of servers that were given for it, which do not leave while they live.
      added_s: when it was added. changed_s: when a server last joined or left.
    """

    key: Hash
    num_blocks: int
    num_tokens: int
    configured: bool
    arrivals: WindowedRate
    work: WindowedRate
    added_s: float
    members: list[int] = dataclasses.field(default_factory=list)
    servers: int = 0
    given: set[int] = dataclasses.field(default_factory=set)
    high_since: float | None = None
    low_since: float | None = None
    changed_s: float = -math.inf


@dataclasses.dataclass
class TableSettings:
    """When a prefix gets servers, and how many.

    Args:
      window_s: seconds over which arrivals and work are averaged.
      min_rate: arrivals per second from which a prefix gets servers; with less than half of it for shrink_after_s, it
        loses them. min_blocks: shortest such prefix. max_share: share of all requests above which a prefix is no reason
        to prefer a server.
      grow_above, grow_after_s: a server joins when work per server has been above grow_above for grow_after_s.
      shrink_below, shrink_after_s: a server leaves when it has been below shrink_below for shrink_after_s. At most half
        of grow_above, so that those that stay do not call for another.
      change_every_s: least time between two changes of one prefix.
      max_prefixes_per_server: sets that a server may belong to. pool_share: of its pool that their prefixes may fill.
      num_counters: of the sketch that finds frequent prefixes.
    """

    window_s: float = 60.0
    min_rate: float = 0.1
    min_blocks: int = 2
    max_share: float = 0.9
    grow_above: float = 0.8
    grow_after_s: float = 5.0
    shrink_below: float = 0.4
    shrink_after_s: float = 60.0
    change_every_s: float = 1.0
    max_prefixes_per_server: int = 8
    pool_share: float = 0.5
    num_counters: int = 2048

    def __post_init__(self) -> None:
        checks.require(
            checks.number("window_s", self.window_s, above=0),
            checks.number("min_rate", self.min_rate, above=0),
            checks.integer("min_blocks", self.min_blocks),
            checks.number("max_share", self.max_share, above=0, high=1),
            checks.number("grow_above", self.grow_above, above=0),
            checks.number("grow_after_s", self.grow_after_s, 0),
            checks.number("shrink_below", self.shrink_below, 0, self.grow_above / 2),
            checks.number("shrink_after_s", self.shrink_after_s, 0),
            checks.number("change_every_s", self.change_every_s, 0),
            checks.integer("max_prefixes_per_server", self.max_prefixes_per_server),
            checks.number("pool_share", self.pool_share, above=0, high=1),
            checks.integer("num_counters", self.num_counters),
            error=ConfigError,
        )


class PrefixTable:
    """Prefixes by the hash of their last block. It decides when servers join or leave; the caller, which one joins.

    Few prefixes for each server keep its hit rate: its pool then has room for their blocks and for requests'.
    """

    def __init__(self, settings: TableSettings | None = None):
        self.settings = settings or TableSettings()
        self.prefixes: dict[Hash, Prefix] = {}
        self.num_prefixes, self.num_tokens = np.zeros(0), np.zeros(0)  # [S]: sets of each server, and their tokens
        self._frequent = FrequentKeys(self.settings.num_counters, self.settings.window_s)
        self._all = ""  # counted with each arrival; no block has this name
        self._lengths: dict[int, int] = {}  # number of prefixes with as many blocks
        self._longest_first: list[int] = []
        self._cleaned_s = -math.inf

    def grow(self, num_servers: int) -> None:
        """Makes room for the servers with numbers below num_servers."""
        missing = max(0, num_servers - len(self.num_tokens))
        self.num_prefixes = np.append(self.num_prefixes, np.zeros(missing))
        self.num_tokens = np.append(self.num_tokens, np.zeros(missing))

    def find(self, hashes: Sequence[Hash]) -> Prefix | None:
        """Returns the longest prefix of a prompt that is in the table."""
        get, last = self.prefixes.get, len(hashes)
        for length in self._longest_first:
            if length <= last and (found := get(hashes[length - 1])) is not None:
                return found
        return None

    def add(self, hashes: Sequence[Hash], block_size: int, now: float, configured: bool = False) -> Prefix:
        """Adds the prefix of these blocks; returns it, or the existing one."""
        key, window_s = hashes[-1], self.settings.window_s
        found = self.prefixes.get(key)
        if found is None:
            arrivals, work = WindowedRate(window_s, now), WindowedRate(window_s, now)
            found = Prefix(
                key,
                len(hashes),
                len(hashes) * block_size,
                configured,
                arrivals,
                work,
                now,
            )
            self.prefixes[key] = found
            self._count_length(len(hashes), 1)
        found.configured |= configured
        return found

    def remove(self, prefix: Prefix) -> None:
        for server in list(prefix.members):
            self._leave(prefix, server)
        del self.prefixes[prefix.key]
        self._count_length(prefix.num_blocks, -1)

    def arrived(self, hashes: Sequence[Hash], block_size: int, now: float) -> None:
        """Counts the arrival of a prompt; adds the longest of its prefixes that has become frequent.

        Lengths grow by about a third, and a longer prefix is counted once a shorter one has been seen, so that a prompt
        without repetition takes one counter.
        """
        frequent, s = self._frequent, self.settings
        frequent.turn(now)
        least = max(2.0, s.min_rate * frequent.span_s(now))
        most = s.max_share * frequent.add(self._all)
        length, longest = s.min_blocks, 0
        while length <= len(hashes):
            key = hashes[length - 1]
            count = frequent.add(key)
            if count < least:  # also if it was not seen before
                break
            if count <= most:
                longest = length
            length += max(1, length // 3)
        if longest:
            self.add(hashes[:longest], block_size, now)
        if now >= self._cleaned_s + 1:
            self._cleaned_s = now
            self._clean(now)

    def should_grow(self, prefix: Prefix, now: float, crowded: bool) -> bool:
        """True if a server should join now. crowded: whether a request had to go elsewhere."""
        s, wanted = self.settings, prefix.work.rate(now)
        high = crowded or wanted > s.grow_above * len(prefix.members)
        prefix.high_since = (prefix.high_since if prefix.high_since is not None else now) if high else None
        if now < prefix.changed_s + s.change_every_s:
            return False
        return not prefix.members or (prefix.high_since is not None and now >= prefix.high_since + s.grow_after_s)

    def may_join(self, prefix: Prefix, pool_tokens: np.ndarray) -> np.ndarray:
        """Returns which servers, [S] bool, have room for another prefix. pool_tokens: of each server, [S]."""
        room = self.num_tokens + prefix.num_tokens <= self.settings.pool_share * pool_tokens
        room &= self.num_prefixes < self.settings.max_prefixes_per_server
        room[prefix.members] = False
        return room

    def join(self, prefix: Prefix, server: int, now: float) -> None:
        """Adds a server to a prefix."""
        prefix.members.append(server)
        prefix.servers |= 1 << server
        prefix.changed_s = now
        self.num_prefixes[server] += 1
        self.num_tokens[server] += prefix.num_tokens

    def give(self, prefix: Prefix, server: int) -> None:
        """Adds a server that was given for a prefix, unless it belongs to as many sets as it may."""
        if self.num_prefixes[server] < self.settings.max_prefixes_per_server and server not in prefix.members:
            self.join(prefix, server, prefix.changed_s)
        if server in prefix.members:
            prefix.given.add(server)

    def shrink(self, prefix: Prefix, now: float) -> None:
        """Removes the server that joined last, if the rest have long been enough; given ones stay."""
        s, members = self.settings, prefix.members
        can = len(members) > max(1, len(prefix.given))
        low = can and prefix.work.rate(now) < s.shrink_below * len(members)
        prefix.low_since = (prefix.low_since if prefix.low_since is not None else now) if low else None
        if prefix.low_since is not None and now >= prefix.low_since + s.shrink_after_s:
            self._leave(prefix, next(server for server in reversed(members) if server not in prefix.given))
            prefix.changed_s, prefix.low_since = now, now

    def server_gone(self, server: int) -> None:
        """Removes a server from all sets."""
        for prefix in self.prefixes.values():
            if server in prefix.members:
                self._leave(prefix, server)

    def _count_length(self, num_blocks: int, change: int) -> None:
        count = self._lengths.pop(num_blocks, 0) + change
        if count:
            self._lengths[num_blocks] = count
        self._longest_first = sorted(self._lengths, reverse=True)

    def _leave(self, prefix: Prefix, server: int) -> None:
        prefix.members.remove(server)
        prefix.given.discard(server)
        prefix.servers ^= 1 << server
        self.num_prefixes[server] -= 1
        self.num_tokens[server] -= prefix.num_tokens

    def _clean(self, now: float) -> None:
        """Shrinks sets, and removes prefixes that are no longer requested."""
        for prefix in list(self.prefixes.values()):
            self.shrink(prefix, now)
            rare = prefix.arrivals.rate(now) < self.settings.min_rate / 2
            since = max(prefix.added_s, prefix.changed_s)
            if rare and not prefix.configured and now >= since + self.settings.shrink_after_s:
                self.remove(prefix)
