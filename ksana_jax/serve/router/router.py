"""Sends requests to servers: policy, index of caches and ledger of work. Knows no HTTP and no clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.events import Event
from ksana_jax.serve.router.index import CacheIndex
from ksana_jax.serve.router.ledger import Ledger, UnfinishedRequest
from ksana_jax.serve.router.policies import Policy, read_policy
from ksana_jax.serve.router.policies.prefix_table import PrefixTablePolicy
from ksana_jax.serve.router.request import Hash, RoutedRequest
from ksana_jax.serve.router.settings import RouterSettings
from ksana_jax.serve.router.view import FleetView

ServerId = Hashable


class NoServer(RuntimeError):
    """No server is ready to take a request."""


@dataclasses.dataclass
class Counts:
    """Sums since the start.

    choices: requests sent, by server. prompt_tokens: of them. expected_tokens: prompt tokens that their servers were
    expected to have cached. reported_tokens, reported_of: cached tokens that servers reported, and the expected ones of
    the same requests.
    """

    choices: dict[Any, int] = dataclasses.field(default_factory=dict)
    prompt_tokens: int = 0
    expected_tokens: int = 0
    reported_tokens: int = 0
    reported_of: int = 0


class Router:
    """Chooses the server of each request, and accounts for it until it has ended.

    For one thread. Times are seconds on any clock that does not run backwards.

    Args:
      servers: their ids: addresses, numbers, or other names.
      policy: a name in POLICIES, {"name": ..., and its settings}, "package.module:Class" or a Policy.
      settings: of the servers and the index.
      seed: of all random choices; equal seeds and calls give equal choices.

    Raises:
      ConfigError: there is no such policy or setting.
    """

    def __init__(
        self,
        servers: Iterable[ServerId] = (),
        policy: Any = "min_ttft",
        settings: RouterSettings | None = None,
        seed: int = 0,
    ):
        self.policy: Policy = read_policy(policy)
        self.settings = settings or RouterSettings()
        self.index, self.ledger = CacheIndex(self.settings.ttl_s), Ledger(self.settings)
        self.random, self.counts = random.Random(seed), Counts()
        self._ids: list[ServerId | None] = []
        self._numbers: dict[ServerId, int] = {}
        # Last blocks of the configured prefixes that a server is given, by its id, whether or not it is attached.
        self._given: dict[ServerId, set[Hash]] = {}
        self._weights = np.zeros(0)
        self._ready, self._closed = np.zeros(0, np.int64), np.zeros(0)
        for server in servers:
            self.add_server(server)

    # ------------------------------------------------------------------ servers

    @property
    def servers(self) -> list[ServerId]:
        """The ids of all servers, ready or not."""
        return list(self._numbers)

    def add_server(
        self, server: ServerId, *, prefill_tokens_per_s: float | None = None, pool_tokens: int | None = None
    ) -> None:
        """Adds a server, ready at once. Its rate and pool default to the settings'.

        Raises:
          ConfigError: there is a server of this id, or a value is out of range.
        """
        if server in self._numbers:
            raise ConfigError(f"there are two servers {server!r}, must differ")
        rate = self.settings.prefill_tokens_per_s if prefill_tokens_per_s is None else prefill_tokens_per_s
        pool = self.settings.pool_tokens if pool_tokens is None else pool_tokens
        checks.require(
            checks.number("prefill_tokens_per_s", rate, above=0),
            checks.integer("pool_tokens", pool, optional=True),
            error=ConfigError,
        )
        number = self._ids.index(None) if None in self._ids else len(self._ids)
        if number == len(self._ids):
            self._ids.append(None)
            self._weights = np.append(self._weights, 0.0)
            self.ledger.grow()
            self.index.grow()
        self._ids[number], self._numbers[server] = server, number
        self.ledger.set_speed(number, rate, np.inf if pool is None else pool)
        self.index.capacity[number] = np.inf if pool is None else pool // self.settings.block_size
        self.policy.added(number)
        for key in self._given.get(server, ()):
            self.require_table().give(key, number)
        self.set_weight(server, 1.0)

    def set_weight(self, server: ServerId, weight: float) -> None:
        """Sets the probability with which a server may be chosen at a decision: 0 if draining, 1 if ready, and between
        them while it warms up. Without a server of weight 1, all of positive weight may be."""
        self._weights[self._numbers[server]] = weight
        self._refresh()

    def remove(self, server: ServerId, now: float) -> list[str]:
        """Removes a lost server and its cached blocks; returns the ids of the requests that end with it."""
        number = self._numbers[server]
        lost = [live.request.request_id for live in self.ledger.on(number)]
        for request_id in lost:
            self._end(request_id, now)
        self.index.clear(number)
        self.policy.removed(number, now)
        self._weights[number], self._ids[number] = 0.0, None
        del self._numbers[server]
        self._refresh()
        return lost

    def _refresh(self) -> None:
        self._ready = np.flatnonzero(self._weights > 0)
        self._closed = np.where(self._weights > 0, 0.0, np.inf)
        self._warming = self._ready[self._weights[self._ready] < 1]

    def events(self, server: ServerId, events: Iterable[Event]) -> None:
        """Applies a server's cache events; see `CacheIndex.apply`."""
        self.index.apply(self._numbers[server], events)

    def configure_prefix(self, hashes: Sequence[Hash], now: float, servers: Iterable[ServerId] = ()) -> None:
        """Adds a prefix to the table of the policy prefix_table, where it stays however rare it is.

        Args:
          hashes: of its full blocks; see `hashes_of`.
          servers: which it has from the start and keeps; one that is not up yet, or comes back, joins when it is
            added. Demand may add others. A server takes max_prefixes_per_server prefixes and no more.

        Raises:
          ConfigError: the policy is another one, or there is no full block.
        """
        policy = self.require_table()
        if not hashes:
            raise ConfigError(f"a prefix has no full block of {self.settings.block_size} tokens")
        servers = list(servers)
        for server in servers:
            self._given.setdefault(server, set()).add(hashes[-1])
        there = [self._numbers[server] for server in servers if server in self._numbers]
        policy.configure(hashes, self.settings.block_size, now, there)

    def require_table(self) -> PrefixTablePolicy:
        """Returns the policy; raises ConfigError if it is not prefix_table."""
        if not isinstance(self.policy, PrefixTablePolicy):
            raise ConfigError(f"prefixes are configured for policy prefix_table, not {type(self.policy).__name__}")
        return self.policy

    # ------------------------------------------------------------------ requests

    def choose(self, request: RoutedRequest, now: float, exclude: Collection[ServerId] = ()) -> ServerId:
        """Chooses a server and takes the request into the ledger.

        Args:
          exclude: servers that have failed with this request.

        Raises:
          NoServer: no server is ready.
          ValueError: a request of this id is under way.
        """
        if request.request_id in self.ledger.live:
            raise ValueError(f"request {request.request_id!r} is under way")
        ready, closed = self._open(exclude)
        self.index.sweep(now)
        view = FleetView(request, now, ready, closed, self.ledger, self.index, self.settings, self.random)
        number = self.policy.choose(request, view)
        if not 0 <= number < len(closed) or closed[number]:
            raise ValueError(f"policy {type(self.policy).__name__} chose server {number!r}, which is not ready")
        matched = view.matched_of(number)
        self.ledger.add(UnfinishedRequest(request, number, matched, view.work_of(number, matched), now))
        self.index.expect(number, request.hashes, now)
        self.policy.sent(request, number, view)
        server, counts = self._ids[number], self.counts
        counts.choices[server] = counts.choices.get(server, 0) + 1
        counts.prompt_tokens += request.num_prompt
        counts.expected_tokens += matched
        return server

    def _open(self, exclude: Collection[ServerId]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the servers that a request may go to, and 0 for them and inf for others, [S]."""
        ready, closed = self._ready, self._closed
        if len(self._warming) or exclude:
            out = {self._numbers[server] for server in exclude if server in self._numbers}
            out |= {int(n) for n in self._warming if self.random.random() >= self._weights[n]}
            left = [n for n in ready.tolist() if n not in out]
            if not left:  # a warming server is better than none
                left = [n for n in ready.tolist() if self._ids[n] not in exclude]
            ready = np.array(left, np.int64)
            closed = np.full(len(closed), np.inf)
            closed[ready] = 0.0
        if not len(ready):
            raise NoServer(f"none of {len(self._numbers)} servers is ready" + " for another try" * bool(exclude))
        return ready, closed

    def first_token(self, request_id: str, now: float) -> None:
        """Records the end of a request's prefill. Ended requests are ignored."""
        live = self.ledger.first_token(request_id, now)
        if live is not None:
            self.policy.first_token(live, now)

    def progress(self, request_id: str, num_tokens: int, now: float) -> None:
        """Records num_tokens more output tokens of a request. Ended requests are ignored."""
        self.first_token(request_id, now)
        self.ledger.progress(request_id, num_tokens, now)

    def finished(self, request_id: str, now: float, cached_tokens: int | None = None) -> bool:
        """Ends a request, however it ended.

        Args:
          cached_tokens: prompt tokens that the server had cached, if it said so.

        Returns:
          False if it has ended before, as with a server that was removed.
        """
        live = self._end(request_id, now)
        if live is not None and cached_tokens is not None:
            self.counts.reported_tokens += cached_tokens
            self.counts.reported_of += live.matched
        return live is not None

    def _end(self, request_id: str, now: float) -> UnfinishedRequest | None:
        live = self.ledger.end(request_id, now)
        if live is not None:
            self.policy.ended(live, now)
        return live
