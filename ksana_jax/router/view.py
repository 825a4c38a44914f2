"""What a policy sees at one decision: servers, their load, and what they cache of the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ksana_jax.router.index import CacheIndex, Match
from ksana_jax.router.ledger import Ledger
from ksana_jax.router.request import RoutedRequest
from ksana_jax.router.settings import RouterSettings


class _computed_once:
    """functools.cached_property of Python 3.11 takes a lock, which costs more than the array operations here."""

    def __init__(self, compute: Callable[[Any], np.ndarray]):
        self._compute, self.__doc__, self._name = compute, compute.__doc__, compute.__name__

    def __get__(self, view: Any, kind: Any) -> np.ndarray:
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
        tokens = self.match.blocks(len(self.closed))
        tokens *= self.settings.block_size
        if self.match.longest * self.settings.block_size >= self.request.num_prompt:
            np.minimum(tokens, self.request.num_prompt - 1, out=tokens)
        return tokens

    @_computed_once
    def wait_s(self) -> np.ndarray:
        """Seconds until each server would begin with this request; see `Ledger.wait_s`."""
        return self.ledger.wait_s(self.now)

    @_computed_once
    def prefill_s(self) -> np.ndarray:
        """Seconds of this prompt's prefill on each server, without the tokens that it caches."""
        if not self.match.levels:
            return self.ledger.token_s * self.settings.work(self.request.num_prompt, 0)
        work = self.settings.work(self.request.num_prompt - self.matched, self.matched)
        work *= self.ledger.token_s
        return work

    @property
    def all_ready(self) -> bool:
        """Whether every server may be chosen."""
        return len(self.ready) == len(self.closed)

    def lowest(self, cost: np.ndarray) -> int:
        """Returns the ready server with the lowest cost [S]; ties are broken at random."""
        if not self.all_ready:
            cost = cost + self.closed
        first = cost.argmin()
        ties = (cost == cost[first]).nonzero()[0]
        return int(first if len(ties) == 1 else ties[int(self.random.random() * len(ties))])

    def lowest_of(self, servers: np.ndarray, cost: np.ndarray) -> int:
        """Returns the one of some servers, given by number, with the lowest cost [S]; ties are broken at random."""
        costs = cost[servers]
        ties = (costs == costs[costs.argmin()]).nonzero()[0]
        return int(servers[ties[int(self.random.random() * len(ties))]])

    def any_ready(self) -> int:
        """Returns a ready server at random."""
        return int(self.ready[int(self.random.random() * len(self.ready))])
