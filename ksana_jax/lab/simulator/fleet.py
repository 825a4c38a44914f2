"""Several servers behind the real router, in one simulated time. Knows neither policies nor schedulers.

A server is a `SimEngine`, which runs the real engine. The router hears of first tokens and ends when they have crossed
the network, and decides by its own ledger and index, as in the proxy.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ksana_jax.lab.simulator.chains import Chains
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import Coverage
from ksana_jax.lab.simulator.one_engine import Served, SimEngine
from ksana_jax.lab.simulator.run import Arrivals, InSystem
from ksana_jax.serve.router.request import RoutedRequest
from ksana_jax.serve.router.router import Router
from ksana_jax.serve.workload.report import RequestTimes, growth

if TYPE_CHECKING:
    from ksana_jax.serve.workload.items import WorkItem

# Seconds from the router to a server, and back.
NETWORK_S = 0.001
# Requests of a server from which `growing` judges its queue.
LEAST_JUDGED = 100


class MakeServer(Protocol):
    """Makes a server in a simulation, with the callbacks of `SimEngine`."""

    def __call__(
        self, events: VirtualClock, *, answered: Callable[[Served], None], ended: Callable[[Served], None]
    ) -> SimEngine: ...


@dataclasses.dataclass(eq=False, slots=True)
class SentRequest:
    """A request on its way. server: number of its server. Times are the client's, in seconds; NaN for never."""

    item: WorkItem
    server: int
    sent_s: float
    served: Served | None = None
    first_token_s: float = math.nan
    finished_s: float = math.nan

    @property
    def times(self) -> RequestTimes:
        served, item = self.served, self.item
        times = RequestTimes(
            item.index, self.sent_s, self.first_token_s, self.finished_s, item.num_prompt, client=item.client
        )
        if served is None:
            return times
        counts = {"num_output": served.num_output, "num_cached_tokens": served.num_cached_tokens}
        return dataclasses.replace(times, **counts, error="refused" if served.error else None)


@dataclasses.dataclass(frozen=True)
class FleetRun:
    """A finished simulation of a fleet.

    trips: of all requests, in the order of their arrival. busy_s: of each server. seconds: of the simulation.
    """

    trips: list[SentRequest]
    busy_s: list[float]
    seconds: float

    @property
    def requests(self) -> list[RequestTimes]:
        """Results as clients saw them."""
        return [trip.times for trip in self.trips]

    @property
    def imbalance(self) -> float:
        """Seconds of work of the busiest server / mean of all: 1 is balanced."""
        return max(self.busy_s) / mean if (mean := sum(self.busy_s) / len(self.busy_s)) else 1.0


def serve(
    items: Sequence[WorkItem],
    make_server: MakeServer,
    router: Router,
    chains: Chains,
    *,
    network_s: float = NETWORK_S,
) -> FleetRun:
    """Serves a workload on a fleet, to the end.

    Args:
      make_server: called for each of the router's servers, which are numbered from 0.
      chains: of the workload, with the block size of the router's settings.
      network_s: from the router to a server, and back.

    Raises:
      ConfigError: too much of the servers' time went to steps of shapes unknown to the cost model.
      AssertionError: a law that every run must obey does not hold: a request is lost, time runs backwards, or Little's
        law fails.
    """
    assert chains.block_size == router.settings.block_size and router.servers == list(range(len(router.servers)))
    events, counted = VirtualClock(), InSystem()
    trips: dict[int, SentRequest] = {}

    def send(item: WorkItem) -> None:
        now = events()
        counted.change(1, now)
        asked = RoutedRequest(str(item.index), item.num_prompt, chains.of_prompt(item), item.max_tokens, item.client)  # pyright: ignore[reportArgumentType]
        server = router.choose(asked, now)
        assert isinstance(server, int)
        trip = trips[item.index] = SentRequest(item, server, now)

        def arrive() -> None:
            trip.served = servers[server].submit(item)

        events.at(now + network_s, arrive)

    def answered(served: Served) -> None:
        def hear() -> None:
            trips[served.item.index].first_token_s = events()
            router.first_token(str(served.item.index), events())

        events.at(events() + network_s, hear)

    def ended(served: Served) -> None:
        def hear() -> None:
            trip = trips[served.item.index]
            trip.finished_s = events()
            counted.change(-1, events())
            router.finished(str(served.item.index), events(), served.num_cached_tokens)
            arrivals.ended(served.item)

        events.at(events() + network_s, hear)

    servers = [make_server(events, answered=answered, ended=ended) for _ in router.servers]
    arrivals = Arrivals(items, events, send)
    # Otherwise Python's garbage collector walks through the workload's hashes repeatedly: 1.1 to 1.2 times the time.
    gc.freeze()
    try:
        events.run()
    finally:
        gc.unfreeze()
    run = FleetRun(sorted(trips.values(), key=lambda trip: trip.sent_s), [s.busy_s for s in servers], events())
    _check(run, counted, len(items))
    Coverage.of(server.coverage for server in servers).check()
    return run


def growing(trips: Sequence[SentRequest]) -> list[str]:
    """Names the servers whose queue grows, as the requests of one among many may hardly show in the figures of all.

    Args:
      trips: that are judged. Servers with fewer than LEAST_JUDGED are not: their means are noise.
    """
    of_server: dict[int, list[RequestTimes]] = {}
    for trip in trips:
        if (times := trip.times).finished:
            of_server.setdefault(trip.server, []).append(times)
    judged = {server: times for server, times in sorted(of_server.items()) if len(times) >= LEAST_JUDGED}
    found = [f"server {server} ({grown})" for server, times in judged.items() if (grown := growth(times))]
    return [f"the queue of {len(found)} of {len(judged)} servers grows: {_first(found, 3)}"] if found else []


def _first(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + ", ..." * (len(names) > count)


def _check(run: FleetRun, counted: InSystem, num_items: int) -> None:
    left = [f"{t.item.index} (server {t.server})" for t in run.trips if math.isnan(t.finished_s)]
    assert not left, f"{len(left)} of {num_items} requests did not end: {_first(left, 5)}"
    assert len(run.trips) == num_items, f"{num_items - len(run.trips)} of {num_items} requests were never sent"
    for trip in run.trips:
        assert trip.served is not None
        times = (trip.sent_s, trip.served.scheduled_s, trip.first_token_s, trip.finished_s)
        assert trip.served.error or times == tuple(sorted(times)), f"request {trip.item.index} out of order: {times}"
    counted.check(sum(trip.finished_s - trip.sent_s for trip in run.trips))
