"""Queues with Poisson arrivals, on the clock of the simulator and with its laws, beside their known answers.

Sources: Kleinrock, Queueing Systems 1 (1975): M/M/1 and M/D/1 (Pollaczek-Khinchine), M/M/k (Erlang C); Little (1961).
"""

import collections
import math
from collections.abc import Callable

import numpy as np

from experiments.simulator.predicting import Check
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.run import InSystem

# Allowed relative error of a mean at NUM_REQUESTS requests.
TOLERANCE, NUM_REQUESTS = 0.02, 100_000


class Queue:
    """A first-come first-served queue with k servers, driven by events.

    Args:
      service_s: of each request, in their order.
    """

    def __init__(self, events: VirtualClock, num_servers: int, service_s: np.ndarray):
        self.events, self.free = events, num_servers
        self.service_s, self.waiting = service_s.tolist(), collections.deque()
        self.in_system = InSystem()
        self.arrival_s = [math.nan] * len(service_s)
        self.ended_s = [math.nan] * len(service_s)

    def arrive(self, number: int) -> None:
        self.in_system.change(1, self.events())
        self.arrival_s[number] = self.events()
        self.waiting.append(number)
        self._start()

    def _start(self) -> None:
        while self.free and self.waiting:
            number = self.waiting.popleft()
            self.free -= 1
            self.events.at(self.events() + self.service_s[number], lambda number=number: self._end(number))

    def _end(self, number: int) -> None:
        self.in_system.change(-1, self.events())
        self.ended_s[number] = self.events()
        self.free += 1
        self._start()


def mean_time_in(
    rate: float, num_servers: int, service_s: Callable[[np.random.Generator, int], np.ndarray], count: int, seed: int
) -> tuple[float, float]:
    """Simulates a queue; returns the mean time in it, and the mean number in it over rate x time (Little: 1)."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    events = VirtualClock()
    queue = Queue(events, num_servers, service_s(rng, count))

    def arrive(number: int) -> None:
        queue.arrive(number)
        if number + 1 < count:
            events.at(float(arrivals[number + 1]), lambda: arrive(number + 1))

    events.at(float(arrivals[0]), lambda: arrive(0))
    events.run()
    times = np.array(queue.ended_s) - np.array(queue.arrival_s)
    return float(times.mean()), queue.in_system.area / float(times.sum())


def erlang_c(offered: float, num_servers: int) -> float:
    """Returns the probability that a request of M/M/k waits."""
    terms = [offered**n / math.factorial(n) for n in range(num_servers)]
    last = offered**num_servers / math.factorial(num_servers) * num_servers / (num_servers - offered)
    return last / (sum(terms) + last)


def known_answers(count: int = NUM_REQUESTS, seeds: int = 5) -> list[Check]:
    """Checks M/M/1, M/D/1 and M/M/4 at a load of 0.7, as means over some seeds of `count` requests each."""
    mu, rho = 1.0, 0.7

    def exponential(rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.exponential(1 / mu, size)

    def constant(rng: np.random.Generator, size: int) -> np.ndarray:
        return np.full(size, 1 / mu)

    rate4 = 4 * rho * mu
    cases = [
        ("M/M/1", rho * mu, 1, exponential, 1 / (mu - rho * mu)),
        ("M/D/1", rho * mu, 1, constant, 1 / mu + rho / (2 * mu * (1 - rho))),
        ("M/M/4", rate4, 4, exponential, 1 / mu + erlang_c(4 * rho, 4) / (4 * mu - rate4)),
    ]
    found = []
    for name, rate, servers, service, expected in cases:
        runs = [mean_time_in(rate, servers, service, count, seed) for seed in range(seeds)]
        time, law = np.mean(runs, axis=0).tolist()
        found += [
            Check(f"{name}: mean time", expected, time, TOLERANCE),
            Check(f"{name}: L / (lambda W)", 1.0, law, 0.01),
        ]
    return found
