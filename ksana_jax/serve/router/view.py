"""A policy's view at one decision: servers, their load, and their cached blocks of the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.serve.router.index import CacheIndex, Match, unpacked
from ksana_jax.serve.router.ledger import Ledger
from ksana_jax.serve.router.request import Hash, RoutedRequest
from ksana_jax.serve.router.settings import RouterSettings

# Servers up to which their prefill is computed one by one.
MANY = 32


class _computed_once:
    """functools.cached_property of Python 3.11 takes a lock, which costs more than the array operations here."""

    def __init__(self, compute: Callable[[Any], Any]):
        self._compute, self.__doc__, self._name = compute, compute.__doc__, compute.__name__

    def __get__(self, view: Any, kind: Any) -> Any:
        value = view.__dict__[self._name] = self._compute(view)
        return value


class FleetView:
    """The servers as one request finds them, numbered from 0; arrays are [S] and must not be changed.

    Attributes:
      now: seconds on the router's clock.
      ready: numbers of the servers that may be chosen, ascending; at least one.
      closed: 0.0 for those, inf for all others.
      ledger: work under way on each server. index: what each caches.
      random: the router's generator. Use no other, so that equal seeds give equal choices.
    """

    def __init__(
        self,
        request: RoutedRequest,
        now: float,
        ready: np.ndarray,
        closed: np.ndarray,
        ledger: Ledger,
        index: CacheIndex,
        settings: RouterSettings,
        random: random.Random,
    ):
        self.request, self.now, self.ready, self.closed = request, now, ready, closed
        self.ledger, self.index, self.settings, self.random = ledger, index, settings, random

    @_computed_once
    def match(self) -> Match:
        """Each server's cached blocks of this prompt; looked up on first use."""
        return self.index.match(self._hashes)

    @property
    def _hashes(self) -> Sequence[Hash]:
        """Hashes of the blocks that a server can reuse: those before the last token, because sampling needs its
        logits."""
        return self.request.hashes[: (self.request.num_prompt - 1) // self.settings.block_size]

    @_computed_once
    def matched(self) -> np.ndarray:
        """Prompt tokens that each server caches, [S]."""
        tokens = np.zeros(len(self.closed))
        self.match.fill(tokens, self._tokens_of_levels())
        return tokens

    def _tokens_of_levels(self) -> list[int]:
        """Returns the prompt tokens that the servers of each level of the match cache."""
        return [blocks * self.settings.block_size for blocks, _ in self.match.levels]

    def matched_of(self, server: int) -> int:
        """Prompt tokens that one server caches, as in `matched`."""
        if "match" in self.__dict__:
            num_blocks = self.match.of(server)
        else:  # the policy looks at load alone
            num_blocks = self.index.num_matched(server, self._hashes)
        return num_blocks * self.settings.block_size

    @_computed_once
    def wait_s(self) -> np.ndarray:
        """Seconds until each server would begin with this request; see `Ledger.wait_s`."""
        return self.ledger.wait_s(self.now)

    @_computed_once
    def prefill_s(self) -> np.ndarray:
        """Seconds of this prompt's prefill on each server, without the tokens that it caches, and of copies from its
        slower media."""
        work, num_prompt = self.settings.work, self.request.num_prompt
        tokens = np.empty(len(self.closed))
        tokens.fill(work(num_prompt, 0))
        self.match.fill(tokens, [work(num_prompt - matched, matched) for matched in self._tokens_of_levels()])
        for server, num_blocks in self.num_slow.items():
            tokens[server] += self._copying(num_blocks)
        tokens *= self.ledger.token_s
        return tokens

    def among(self, servers: int) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
        """Returns the numbers of the ready servers in a set of bits, ascending, their `wait_s`, and that with
        `prefill_s`: lists for few servers, which takes less time than to compute all, and arrays for many."""
        if servers.bit_count() > MANY:
            numbers, wait_s = self.ready_of(servers), self.wait_s
            return numbers.tolist(), wait_s[numbers], (wait_s + self.prefill_s)[numbers]
        settings, num_prompt, found = self.settings, self.request.num_prompt, []
        wait_of_s, token_s, slow = self.ledger.wait_of_s(self.now), self.ledger.token_s.item, self.num_slow
        # From the longest match, which has most of the servers that a policy asks for.
        for blocks, level in (*reversed(self.match.levels), (0, servers)):
            if here := level & servers:
                servers ^= here
                matched = blocks * settings.block_size
                tokens = settings.work(num_prompt - matched, matched)
                while here:
                    number = here.bit_length() - 1
                    here ^= 1 << number
                    wait_s = wait_of_s(number)
                    work = tokens + self._copying(slow[number]) if number in slow else tokens
                    found.append((number, wait_s, wait_s + work * token_s(number)))
                if not servers:
                    break
        if not self.all_ready:
            found = [entry for entry in found if self.closed[entry[0]] == 0]
        found.sort()
        return [n for n, _, _ in found], [wait_s for _, wait_s, _ in found], [total_s for _, _, total_s in found]

    @_computed_once
    def num_slow(self) -> dict[int, int]:
        """Blocks of the prompt that servers have on slower media only, for those with any."""
        index = self.index
        return index.num_slow(self.request.hashes, self.match) if index.has_slow else {}

    def work_of(self, server: int, matched: int | None = None) -> int:
        """Tokens of this prompt's prefill on one server, as in `prefill_s`. matched: `matched_of` it, if known."""
        matched = self.matched_of(server) if matched is None else matched
        work = self.settings.work(self.request.num_prompt - matched, matched)
        return int(work + self._copying(self.num_slow.get(server, 0)))

    def _copying(self, num_blocks: int) -> float:
        return num_blocks * self.settings.block_size * self.settings.slow_hit_cost

    @property
    def all_ready(self) -> bool:
        """True if every server may be chosen."""
        return len(self.ready) == len(self.closed)

    def lowest(self, cost: np.ndarray) -> int:
        """Returns the ready server with the lowest cost [S]; ties are broken at random."""
        return self.least(cost if self.all_ready else cost + self.closed)

    def least(self, costs: np.ndarray | Sequence[float]) -> int:
        """Returns where the lowest of some costs is; ties are broken at random."""
        if not isinstance(costs, np.ndarray):
            lowest = min(costs)
            if costs.count(lowest) == 1:
                return costs.index(lowest)
            costs = np.array(costs)
        first = int(costs.argmin())
        if first == len(costs) - 1 - costs[::-1].argmin():  # the last of the lowest is the first: no tie
            return first
        ties = (costs == costs[first]).nonzero()[0]
        return int(ties[int(self.random.random() * len(ties))])

    def lowest_of(self, servers: np.ndarray, cost: np.ndarray) -> int:
        """Returns the one of some servers, given by number, with the lowest cost [S]; ties are broken at random."""
        costs = cost[servers]
        ties = (costs == costs[costs.argmin()]).nonzero()[0]
        return int(servers[ties[int(self.random.random() * len(ties))]])

    def ready_of(self, servers: int) -> np.ndarray:
        """Returns the numbers of the ready servers in a set of bits, as in `Match.levels`, ascending."""
        numbers = unpacked(servers, len(self.closed)).nonzero()[0]
        return numbers if self.all_ready else numbers[self.closed[numbers] == 0]

    def any_ready(self) -> int:
        """Returns a ready server at random."""
        return int(self.ready[int(self.random.random() * len(self.ready))])
