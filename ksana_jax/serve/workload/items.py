"""Requests that arrive over time, as simulators, benchmarks and studies take them. Knows no generator and no engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One request of a workload.

    Args:
      index: position in the workload.
      arrival_s: when it is sent, in seconds since the workload began; NaN where `after` is set.
      num_prompt: tokens of the prompt.
      num_output: true length of the answer in tokens. Only the executor that ends the answer, or a client that sets
        ignore_eos, may read it; a scheduler or a router that did would be an oracle.
      max_tokens: what the client asks for, at least num_output: one constant, or a coarse class; see `asked_for`.
      tokens: returns the prompt, [num_prompt] int32; made on demand, equal at each call.
      output_tokens: returns the answer that a simulated executor gives, [num_output] int32. The next turn of a session
        has it in its prompt.
      client: its sender, for fairness and cache salts.
      session: number of its session; None for a single request.
      after: index of the turn that must have ended before this one is sent, think_s seconds later; None for the first.
    """

    index: int
    arrival_s: float
    num_prompt: int
    num_output: int
    max_tokens: int
    tokens: Callable[[], np.ndarray]
    output_tokens: Callable[[], np.ndarray]
    client: str = ""
    session: int | None = None
    after: int | None = None
    think_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests by index: single ones and first turns in order of arrival, later turns of a session after earlier ones.

    Args:
      name: for tables, such as "azure_conv". seed: what was drawn was drawn from it.
      notes: what a reader of results must know, such as rows of a trace that were left out.
    """

    name: str
    seed: int
    items: Sequence[WorkItem]
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        for number, item in enumerate(self.items):
            assert item.index == number and (item.after is None or item.after < number), item
            assert 1 <= item.num_output <= item.max_tokens and item.num_prompt >= 1, item
        if not self.items:
            raise ConfigError(f"workload {self.name!r} has no requests")

    @property
    def arrivals(self) -> np.ndarray:
        """Returns the times at which single requests and first turns are sent, ascending, in seconds."""
        return np.sort([item.arrival_s for item in self.items if item.after is None])

    @property
    def rate(self) -> float:
        """Returns requests per second, later turns of sessions included; infinite if all are sent at once."""
        arrivals = self.arrivals
        span = float(arrivals[-1] - arrivals[0])
        return len(self.items) / len(arrivals) * (len(arrivals) - 1) / span if span else math.inf

    def scaled(self, rate: float) -> Workload:
        """Returns the same requests at another rate: gaps between arrivals are multiplied by one factor, think times
        stay. Two rates thus differ by nothing but the rate (common random numbers).

        Raises:
          ConfigError: rate is not positive, or all requests are sent at once.
        """
        checks.require(checks.number("rate", rate, above=0), error=ConfigError)
        if self.rate == math.inf:
            raise ConfigError(
                f"workload {self.name!r} sends all requests at once: there are no gaps to scale to a rate"
            )
        first, factor = float(self.arrivals[0]), self.rate / rate
        items = [dataclasses.replace(item, arrival_s=first + (item.arrival_s - first) * factor) for item in self.items]
        return dataclasses.replace(self, items=items)

    def describe(self) -> dict[str, Any]:
        """Returns plain values: rate per second, coefficient of variation of the gaps, lengths in tokens."""
        arrivals = self.arrivals
        gaps = np.diff(arrivals)
        sessions = {item.session for item in self.items if item.session is not None}
        return {
            "name": self.name,
            "seed": self.seed,
            "num_requests": len(self.items),
            "num_sessions": len(sessions),
            "rate": self.rate if self.rate < math.inf else None,
            "span_s": float(arrivals[-1] - arrivals[0]),
            "gap_cv": float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() else None,
            # Times rounded to seconds make bursts that the traffic did not have.
            "distinct_arrivals": len(np.unique(arrivals)),
            "prompt_tokens": _spread([item.num_prompt for item in self.items]),
            "output_tokens": _spread([item.num_output for item in self.items]),
            "notes": list(self.notes),
        }


def _spread(lengths: Sequence[int]) -> dict[str, float]:
    p50, p99 = np.percentile(lengths, (50, 99))
    return {"mean": float(np.mean(lengths)), "p50": float(p50), "p99": float(p99), "max": max(lengths)}


def asked_for(num_output: int, max_tokens: int | None, oracle: bool) -> tuple[int, int]:
    """Returns the length of an answer and the max_tokens of its request.

    A client does not know how long the answer will be. It asks for a constant, which cuts longer answers off, or for a
    class: the least of 64, 256, 1,024, 4,096, ... that has room for the answer. With `oracle` it asks for the length
    itself, which gives bounds, not results.
    """
    if max_tokens is not None:
        num_output = min(num_output, max_tokens)
    if oracle:
        return num_output, num_output
    if max_tokens is not None:
        return num_output, max_tokens
    size = 64
    while size < num_output:
        size *= 4
    return num_output, size
