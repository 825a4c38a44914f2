"""Serves a workload on one simulated engine, and checks that nothing was lost and no time was gained. No jax."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import Cost
from ksana_jax.lab.simulator.one_engine import Served, SimEngine
from ksana_jax.serve.workload.report import LatencyLimits, RequestTimes, spread, summarise

if TYPE_CHECKING:
    from ksana_jax.serve.workload.items import WorkItem


class Arrivals:
    """Sends the requests of a workload at their times; later turns of a session when the one before has ended.

    Args:
      events: the simulation's time, at 0 when the workload begins.
      send: called with each request when it arrives.
    """

    def __init__(self, items: Sequence[WorkItem], events: VirtualClock, send: Callable[[WorkItem], None]):
        self._events, self._send = events, send
        self._next: dict[int, list[WorkItem]] = {}
        self.num_sent = 0
        for item in items:
            if item.after is None:
                self._at(item.arrival_s, item)
            else:
                self._next.setdefault(item.after, []).append(item)

    def ended(self, item: WorkItem) -> None:
        """Notes that a request has ended, whereupon the turns after it are sent."""
        for turn in self._next.pop(item.index, ()):
            self._at(self._events() + turn.think_s, turn)

    def _at(self, time: float, item: WorkItem) -> None:
        def happen() -> None:
            self.num_sent += 1
            self._send(item)

        self._events.at(time, happen)


class InSystem:
    """Counts requests over time: the mean number L, and the time with at least one."""

    def __init__(self) -> None:
        self.num, self.area, self.occupied_s, self._since = 0, 0.0, 0.0, 0.0

    def change(self, by: int, now: float) -> None:
        """Notes arrivals (1) and ends (-1)."""
        self.area += self.num * (now - self._since)
        self.occupied_s += (now - self._since) * (self.num > 0)
        self.num, self._since = self.num + by, now

    def check(self, sojourn_s: float) -> None:
        """Checks that no request is left, and Little's law, L = lambda W within 1 %.

        Args:
          sojourn_s: seconds in the system, of all requests together.

        Raises:
          AssertionError: one of them does not hold, with the numbers.
        """
        assert self.num == 0, f"{self.num} requests are left"
        assert abs(self.area - sojourn_s) <= 0.01 * sojourn_s + 1e-9, (
            f"Little's law: the number in the system adds up to {self.area} s, the times in it to {sojourn_s} s"
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished simulation of one engine.

    served: the requests' times, in the order of the workload. records: of the engine's steps. seconds: of the
    simulation. busy_s, host_s, disk_s: seconds of work of device, host and disk, or of waiting for the disk.
    """

    served: list[Served]
    records: list[StepRecord]
    seconds: float
    busy_s: float
    host_s: float
    disk_s: float = 0.0

    def times(self) -> list[RequestTimes]:
        """Returns the requests as `workload.report` takes them, which a benchmark of a server fills too."""
        return [one.times for one in self.served]

    def report(self, limits: LatencyLimits | None = None) -> dict[str, Any]:
        """Returns `workload.report.summarise` of the requests, and what only a simulation knows; times in seconds.

        Args:
          limits: goodput's.
        """
        started = [s for s in self.served if s.finish_reason in ("stop", "length")]
        return {
            **summarise(self.times(), limits),
            "num_refused": sum(s.finish_reason == "refused" for s in self.served),
            "num_preemptions": sum(s.num_preemptions for s in self.served),
            "num_steps": len(self.records),
            "utilisation": self.busy_s / self.seconds if self.seconds else 0.0,
            "wait_s": spread(s.scheduled_s - s.arrival_s for s in started),
        }

    def text(self) -> str:
        """Returns the report as JSON; equal runs give equal bytes."""
        return json.dumps(self.report(), indent=1, sort_keys=True) + "\n"


def simulate(items: Sequence[WorkItem], model: ModelConfig, config: EngineConfig, cost: Cost, **settings: Any) -> Run:
    """Serves a workload on an engine of its own, to the end.

    Args:
      settings: further ones of `SimEngine`.

    Raises:
      ConfigError: see `SimEngine`; or too much of the time went to steps of shapes unknown to the cost model.
      AssertionError: a law that every run must obey does not hold, see `check`.
    """
    events, counted = VirtualClock(), InSystem()
    served: dict[int, Served] = {}

    def send(item: WorkItem) -> None:
        counted.change(1, events())
        served[item.index] = engine.submit(item)

    def ended(one: Served) -> None:
        counted.change(-1, events())
        arrivals.ended(one.item)

    engine = SimEngine(model, config, events, cost, ended=ended, **settings)
    arrivals = Arrivals(items, events, send)
    events.run()
    found = Run(
        [served[item.index] for item in items if item.index in served],
        engine.engine.records,
        events(),
        engine.executor.busy_s,
        engine.executor.host_s,
        engine.disk.busy_s + engine.disk.waited_s if engine.disk is not None else 0.0,
    )
    check(found, counted, arrivals.num_sent)
    engine.coverage.check()
    if len(served) < len(items):
        raise AssertionError(f"{len(items) - len(served)} of {len(items)} requests were never sent")
    return found


def check(run: Run, counted: InSystem, num_sent: int) -> None:
    """Checks the laws that hold for every run that has ended.

    Requests sent = finished + refused. Nothing happens before its cause. Little's law, L = lambda W within 1 %, with L
    counted by events and W from the times of requests. Host, device or disk work whenever there is a request.

    Raises:
      AssertionError: one of them does not hold, with the numbers.
    """
    assert num_sent == len(run.served), f"{num_sent} requests were sent, {len(run.served)} are known"
    sojourn_s = 0.0
    for s in run.served:
        if s.finish_reason == "refused":
            continue
        times = (s.arrival_s, s.scheduled_s, s.first_token_s, s.finished_s)
        assert not any(map(math.isnan, times)), f"request {s.item.index} has not ended: {s}"
        assert list(times) == sorted(times), f"request {s.item.index} has times out of order: {times}"
        sojourn_s += s.finished_s - s.arrival_s
    counted.check(sojourn_s)
    worked_s = run.busy_s + run.host_s + run.disk_s
    assert counted.occupied_s <= worked_s * (1 + 1e-6) + 1e-9, (
        f"requests were there for {counted.occupied_s} s, in which host, device and disk worked {worked_s} s"
    )
