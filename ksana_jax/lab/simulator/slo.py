"""Service-level objectives: limits of latency for each request or for a percentile, and whether a run keeps them.

Knows times of requests; no engine, no rate.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest
from ksana_jax.serve.workload.report import RequestTimes, summarise

# Metrics of a request by the name that objectives use, in seconds; NaN where a request has none.
METRICS: dict[str, Callable[[RequestTimes], float]] = {
    "ttft": lambda request: request.ttft_s,
    "tpot": lambda request: request.tpot_s,
    "e2e": lambda request: request.e2e_s,
    # ORCA's normalised latency.
    "latency_per_token": lambda request: request.e2e_s / max(request.num_output, 1),
}
_NAME = re.compile(r"(?P<metric>\w+?)(?:_p(?P<percent>\d+(?:\.\d+)?))?")


@dataclasses.dataclass(frozen=True)
class Limit:
    """An upper limit of a metric, in seconds. percent: the percentile that must keep it; None for each request."""

    metric: str
    limit_s: float
    percent: float | None = None

    @property
    def name(self) -> str:
        return self.metric if self.percent is None else f"{self.metric}_p{self.percent:g}"


@dataclasses.dataclass(frozen=True)
class SLO:
    """Limits, which must all be kept.

    attainment: the least share of requests that keep all limits without a percentile. An answer of one token keeps
    every limit of tpot.
    """

    limits: tuple[Limit, ...]
    attainment: float = 0.9

    @classmethod
    def of(cls, given: Any) -> SLO:
        """Reads {"ttft": 2, "tpot_p99": 0.1, "attainment": 0.9}, or the same as text, "ttft=2,tpot_p99=0.1".

        Raises:
          ConfigError: a metric is unknown (the nearest is named), or a value is out of range.
        """
        values = dict(_read(given) if isinstance(given, str) else given)
        attainment = values.pop("attainment", 0.9)
        checks.require(checks.number("slo.attainment", attainment, above=0, high=1), error=ConfigError)
        if not values:
            raise ConfigError(f"slo has no limit, give at least one, such as ttft_p99=2; metrics: {', '.join(METRICS)}")
        return cls(tuple(_limit(name, value) for name, value in values.items()), attainment)

    @property
    def text(self) -> str:
        """The limits in words."""
        said = [f"{limit.name} <= {limit.limit_s:g} s" for limit in self.limits]
        return ", ".join(said) + f" ({self.attainment:.0%} of requests)" * any(m.percent is None for m in self.limits)

    def judge(self, requests: Sequence[RequestTimes]) -> SLOResult:
        """Returns whether a run keeps the limits, and if not why. A run with unfinished requests or a growing queue
        keeps none: its figures depend on when it was stopped."""
        values: dict[str, float] = {}
        reasons = list(summarise(requests)["failures"])
        if left := [str(request.index) for request in requests if not request.finished]:
            reasons.append(f"not finished: {', '.join(left[:5])}{', ...' * (len(left) > 5)}")
        for limit in self.limits:
            if limit.percent is not None:
                values[limit.name] = value = percentile(requests, limit.metric, limit.percent)
                if not value <= limit.limit_s:
                    reasons.append(f"{limit.name} is {value:.3g} s, over {limit.limit_s:g} s")
        each = [limit for limit in self.limits if limit.percent is None]
        kept = sum(r.finished and not any(METRICS[m.metric](r) > m.limit_s for m in each) for r in requests)
        values["attainment"] = kept / max(len(requests), 1)
        if each and values["attainment"] < self.attainment:
            reasons.append(f"attainment is {values['attainment']:.1%}, under {self.attainment:.0%}")
        return SLOResult(not reasons, values, tuple(reasons))


def percentile(requests: Sequence[RequestTimes], metric: str, percent: float) -> float:
    """Returns a percentile of a metric by linear interpolation, in seconds; infinite values for requests that did not
    finish, NaN if no request has the metric."""
    found = [METRICS[metric](request) if request.finished else math.inf for request in requests]
    values = np.array([value for value in found if not math.isnan(value)])
    # Interpolation between infinite values is not a number.
    with np.errstate(invalid="ignore"):
        value = float(np.percentile(values, percent)) if len(values) else math.nan
    return math.inf if math.isnan(value) and len(values) else value


@dataclasses.dataclass(frozen=True)
class SLOResult:
    """A run judged by its objectives. values: attainment and the limited percentiles. reasons: why it failed them."""

    met: bool
    values: dict[str, float]
    reasons: tuple[str, ...] = ()


def _read(text: str) -> dict[str, float]:
    found = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"slo has {part!r:.60}, must be NAME=SECONDS, such as ttft_p99=2") from None
    return found


def _limit(name: str, value: Any) -> Limit:
    parts = _NAME.fullmatch(str(name))
    metric = parts["metric"] if parts else str(name)
    if metric not in METRICS:
        raise ConfigError(f"slo has unknown metric {metric!r:.60}; the nearest is {nearest(metric, METRICS, 0.0)!r}")
    percent = float(parts["percent"]) if parts and parts["percent"] else None
    checks.require(
        checks.number(f"slo.{name}", value, above=0),
        checks.number(f"percentile of slo.{name}", percent, 0, 100, optional=True),
        error=ConfigError,
    )
    return Limit(metric, float(value), percent)
