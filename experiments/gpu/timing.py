"""The only stopwatch: candidates in interleaved rounds A B C, C B A, and chains of calls in one program.

Two ways to time a function of jax. *Chained*: CHAIN calls in one program, each fed by the one before, so that the host
does not matter; the programs themselves are started one after the other without waiting. *Dispatched*: CHAIN calls of a
program that holds one call; what the host needs for each is in it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from experiments.gpu.context import Context

CHAIN = 50
ROUNDS = 6
# One sample lasts at least so long, so that starting and waiting for it weigh little.
SAMPLE_S = 0.02


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call in each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def fields(self) -> dict[str, Any]:
        """Microseconds, for a record."""
        low, high = min(self.rounds), max(self.rounds)
        return {"us": self.median * 1e6, "us_low": low * 1e6, "us_high": high * 1e6, "rounds": len(self.rounds)}


K = TypeVar("K")  # names a candidate, or a candidate and a mode
Sampler = Callable[[], float]  # seconds of one call, from one sample of many calls


def rounds(
    samplers: dict[K, Sampler], *, count: int = ROUNDS, left: Callable[[], float] = lambda: 1e9
) -> tuple[dict[K, Times], dict[K, Exception]]:
    """Takes `count` samples of each in interleaved rounds, every second round backwards.

    Args:
      left: seconds left; once they are used up, the rounds taken so far count.

    Returns:
      Times of those that worked, and why others did not; one that fails takes no part in later rounds.
    """
    taken: dict[K, list[float]] = {name: [] for name in samplers}
    failed: dict[K, Exception] = {}
    for index in range(count):
        if index and left() <= 0:
            break
        for name in list(samplers)[:: -1 if index % 2 else 1]:
            if name in failed:
                continue
            try:
                taken[name].append(samplers[name]())
            except Exception as error:
                failed[name] = error
    return {name: Times(tuple(t)) for name, t in taken.items() if t and name not in failed}, failed


def measured(
    context: Context, samplers: dict[K, Sampler], *, count: int = ROUNDS, spare_s: float = 1.0
) -> tuple[dict[K, Times], dict[K, Exception], dict[str, Any]]:
    """`rounds` within a section's time, and what the GPU's gauges said meanwhile.

    Args:
      spare_s: seconds that must be left to the section for another round to begin.
    """
    if samplers:
        context.timing_begins()
    with context.gauges.watch() as readings:
        times, failed = rounds(samplers, count=count, left=lambda: context.left() - spare_s)
    return times, failed, readings


def chain(step: Callable[[Any, Any, Any], Any], calls: int, donate: bool = True) -> Any:
    """`calls` calls of step(carry, shared, own) -> carry, as one jitted function (carry, shared, owns) -> carry.

    Call i gets owns[i % len(owns)]. The step is traced and lowered once; the carry is donated.
    """
    inner = jax.jit(step)

    def run(carry, shared, owns):
        for index in range(calls):
            carry = inner(carry, shared, owns[index % len(owns)])
        return carry

    return jax.jit(run, donate_argnums=0 if donate else ())


class Chained:
    """A sampler of a compiled `chain`; takes the carry over.

    Args:
      calls: how many calls one run of the function makes.
      sample_s: least seconds of a sample.
    """

    def __init__(
        self, compiled: Callable[..., Any], carry: Any, shared: Any, owns: Any, calls: int, sample_s: float = SAMPLE_S
    ):
        self._compiled, self._carry, self._rest, self._calls = compiled, carry, (shared, owns), calls
        self._repeats = 1
        # The first runs load kernels and record the graph of launches.
        for _ in range(3):
            self()
        self._repeats = max(1, min(1000, round(sample_s / max(self() * calls, 1e-9))))

    def __call__(self) -> float:
        jax.block_until_ready(self._carry)
        started = time.perf_counter()
        for _ in range(self._repeats):
            self._carry = self._compiled(self._carry, *self._rest)
        jax.block_until_ready(self._carry)
        return (time.perf_counter() - started) / (self._repeats * self._calls)


class Dispatched:
    """A sampler of `calls` separate calls; call(index) starts one and returns its result without waiting."""

    def __init__(self, call: Callable[[int], Any], calls: int, warm_ups: int = 2):
        self._call, self._calls = call, calls
        for index in range(warm_ups):
            jax.block_until_ready(call(index))

    def __call__(self) -> float:
        started = time.perf_counter()
        last = None
        for index in range(self._calls):
            last = self._call(index)
        jax.block_until_ready(last)
        return (time.perf_counter() - started) / self._calls
