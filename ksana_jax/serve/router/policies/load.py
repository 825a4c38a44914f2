"""Baseline policies, which look at load alone or at nothing."""

from __future__ import annotations

import dataclasses

from ksana_jax.serve.router.policies.base import Policy
from ksana_jax.serve.router.request import RoutedRequest
from ksana_jax.serve.router.view import FleetView


@dataclasses.dataclass
class Random(Policy):
    """Chooses at random."""

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        return view.any_ready()


@dataclasses.dataclass
class RoundRobin(Policy):
    """Chooses one server after the other."""

    def __post_init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        at = int(view.ready.searchsorted(self._last, side="right"))
        self._last = int(view.ready[at % len(view.ready)])
        return self._last


@dataclasses.dataclass
class LeastWork(Policy):
    """Chooses the server with the least prefill before a request, by tokens that are not cached; then the fewest rows.

    The baseline to beat: counting tokens instead of requests halves the tail of round robin.
    """

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        return view.lowest(view.wait_s)


@dataclasses.dataclass
class PowerOfTwo(Policy):
    """Chooses the one with less work of two servers drawn at random.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        if len(view.ready) == 1:
            return int(view.ready[0])
        one, other = (int(view.ready[at]) for at in view.random.sample(range(len(view.ready)), 2))
        wait_of_s = view.ledger.wait_of_s(view.now)
        return one if wait_of_s(one) <= wait_of_s(other) else other
