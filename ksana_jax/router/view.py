"""What a policy sees at one decision: servers, their load, and what they cache of the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ksana_jax.router.index import CacheIndex, Match, numbers_of, unpacked
from ksana_jax.router.ledger import Ledger
from ksana_jax.router.request import RoutedRequest
from ksana_jax.router.settings import RouterSettings

# Servers up to which their prefill is computed one by one.
MANY = 32


class _computed_once:
    """functools.cached_property of Python 3.11 takes a lock, which costs more than the array operations here."""

    def __init__(self, compute: Callable[[Any], Any]):
        self._compute, self.__doc__, self._name = compute, compute.__doc__, compute.__name__

    def __get__(self, view: Any, kind: Any) -> Any:
        value = view.__dict__[self._name] = self._compute(view)
        return value


class View:
    """The servers as one request finds them, numbered from 0; arrays are [S] and must not be changed.

    Attributes:
      now: seconds on the router's clock.
      ready: numbers of the servers that may be chosen, ascending; at least one.
      closed: 0.0 for those, inf for all others.
      ledger: work under way on each server. index: what each caches. match: what each caches of this prompt.
      random: the router's generator. Use no other, so that equal seeds give equal choices.
    """

    def __init__(
        self,
        request: RoutedRequest,
        now: float,
        ready: np.ndarray,
        closed: np.ndarray,
        match: Match,
        ledger: Ledger,
        index: CacheIndex,
        settings: RouterSettings,
        random: random.Random,
    ):
        self.request, self.now, self.ready, self.closed, self.match = request, now, ready, closed, match
        self.ledger, self.index, self.settings, self.random = ledger, index, settings, random

    @_computed_once
    def matched(self) -> np.ndarray:
        """Prompt tokens that each server caches, [S]; at most all but the last: sampling needs that one's logits."""
        tokens = np.zeros(len(self.closed))
        self.match.fill(tokens, self._tokens_of_levels())
        return tokens

    def _tokens_of_levels(self) -> list[int]:
        """Returns the prompt tokens that the servers of each level of the match cache."""
        block_size, num_prompt = self.settings.block_size, self.request.num_prompt
        tokens = [blocks * block_size for blocks, _ in self.match.levels]
        if tokens and tokens[-1] >= num_prompt:
            tokens[-1] = num_prompt - 1
        return tokens

    def matched_of(self, server: int) -> int:
        """Prompt tokens that one server caches, as in `matched`."""
        return min(self.match.of(server) * self.settings.block_size, self.request.num_prompt - 1)

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

    def prefill_of(self, servers: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the ready servers in a set of bits, ascending, and their seconds as in `prefill_s`,
        which for few servers takes less time than that of all."""
        if servers.bit_count() > MANY:
            numbers = self.ready_of(servers)
            return numbers, self.prefill_s[numbers]
        work, num_prompt, tokens = self.settings.work, self.request.num_prompt, {}
        for (_, level), matched in zip(self.match.levels, self._tokens_of_levels(), strict=True):
            if here := level & servers:
                tokens |= dict.fromkeys(numbers_of(here), float(work(num_prompt - matched, matched)))
                servers ^= here
        if servers:
            tokens |= dict.fromkeys(numbers_of(servers), float(work(num_prompt, 0)))
        for number, num_blocks in self.num_slow.items():
            if number in tokens:
                tokens[number] += self._copying(num_blocks)
        found = sorted(tokens) if self.all_ready else sorted(n for n in tokens if self.closed[n] == 0)
        numbers = np.array(found, np.intp)
        return numbers, np.array([tokens[n] for n in found]) * self.ledger.token_s[numbers]

    @_computed_once
    def num_slow(self) -> dict[int, int]:
        """Blocks of the prompt that servers have on slower media only, for those with any."""
        return self.index.num_slow(self.request.hashes, self.match)

    def work_of(self, server: int) -> int:
        """Tokens of this prompt's prefill on one server, as in `prefill_s`."""
        matched = self.matched_of(server)
        work = self.settings.work(self.request.num_prompt - matched, matched)
        return int(work + self._copying(self.num_slow.get(server, 0)))

    def _copying(self, num_blocks: int) -> float:
        return num_blocks * self.settings.block_size * self.settings.slow_hit_cost

    @property
    def all_ready(self) -> bool:
        """Whether every server may be chosen."""
        return len(self.ready) == len(self.closed)

    def lowest(self, cost: np.ndarray) -> int:
        """Returns the ready server with the lowest cost [S]; ties are broken at random."""
        return self.least(cost if self.all_ready else cost + self.closed)

    def least(self, costs: np.ndarray) -> int:
        """Returns where the lowest of some costs is; ties are broken at random."""
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
