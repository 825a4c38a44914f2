"""Latency, throughput and goodput of served requests: the same figures for a server, an engine and a simulator.

Knows times and counts of requests; no engine, no clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest

PERCENTILES = (50, 90, 99)
_RATES = ("requests", "output_tokens", "prompt_tokens")
# Growth of the mean TTFT from the first half of the requests to the second from which a run has no steady state, and
# the share of the median E2E below which a difference is noise.
GROWTH, LEAST_GROWTH = 1.5, 0.05


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """Times of one request, in seconds on one clock; NaN for events that did not happen.

    Args:
      index: position in the workload.
      sent_s: when it was sent, or was due if the sender was late.
      first_token_s, finished_s: when the first and the last token arrived.
      num_prompt, num_output: tokens of the prompt, and of the answer received.
      num_cached_tokens: prompt tokens that were taken from a prefix cache.
      gaps_s: times between the arrivals of successive pieces of the answer; empty where they are not known.
      error: name of the error; None if the answer is complete.
      client: its sender.
    """

    index: int
    sent_s: float
    first_token_s: float = math.nan
    finished_s: float = math.nan
    num_prompt: int = 0
    num_output: int = 0
    num_cached_tokens: int = 0
    gaps_s: Sequence[float] = ()
    error: str | None = None
    client: str = ""

    @property
    def finished(self) -> bool:
        return self.error is None and not math.isnan(self.finished_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; NaN for an answer of one token, which has none."""
        return (self.finished_s - self.first_token_s) / (self.num_output - 1) if self.num_output > 1 else math.nan

    @property
    def e2e_s(self) -> float:
        """Time from sending to the last token."""
        return self.finished_s - self.sent_s


@dataclasses.dataclass(frozen=True)
class LatencyLimits:
    """Limits in seconds that a good request meets; None sets no limit. Answers of one token meet any tpot_s.

    Source: goodput as in DistServe, arXiv:2401.09670.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def read(cls, text: str) -> LatencyLimits | None:
        """Reads "ttft=2,tpot=0.1", in seconds; an empty text gives None.

        Raises:
          ConfigError: a name is unknown, or a value is not a positive number.
        """
        found: dict[str, float] = {}
        names = [field.name.removesuffix("_s") for field in dataclasses.fields(cls)]
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in names:
                close = nearest(name, names, cutoff=0.0)
                raise ConfigError(f"slo has no limit {name!r}; the nearest of {', '.join(names)} is {close!r}")
            try:
                found[f"{name}_s"] = float(value)
            except ValueError:
                raise ConfigError(
                    f"slo: {name} is {value!r}, must be a number of seconds, as in ttft=2,tpot=0.1"
                ) from None
            checks.require(checks.number(f"slo: {name}", found[f"{name}_s"], above=0), error=ConfigError)
        return cls(**found) if found else None

    def met_by(self, request: RequestTimes) -> bool:
        """True if a request has ended and meets all limits."""
        pairs = ((self.ttft_s, request.ttft_s), (self.tpot_s, request.tpot_s), (self.e2e_s, request.e2e_s))
        return request.finished and not any(limit is not None and value > limit for limit, value in pairs)


def summarise(requests: Sequence[RequestTimes], limits: LatencyLimits | None = None) -> dict[str, Any]:
    """Returns the figures of a run as plain values, None for those without a value; times in seconds.

    seconds: from the first request sent to the last event. requests_per_s, output_tokens_per_s and prompt_tokens_per_s
    count what has finished in that time. ttft_s, tpot_s, e2e_s, itl_s: mean, percentiles and maximum over requests that
    have finished; itl_s over all gaps between pieces of their answers. hit_rate: share of their prompt tokens that was
    cached. errors: {name: count}. failures: why the figures say little: requests that failed or did not end, or a TTFT
    that grows from the first half to the second, as it does when requests arrive faster than they are served.
    """
    done = [request for request in requests if request.finished]
    errors = Counter(request.error for request in requests if request.error is not None)
    begin = min((request.sent_s for request in requests), default=math.nan)
    events = [t for r in requests for t in (r.sent_s, r.first_token_s, r.finished_s) if not math.isnan(t)]
    seconds = max(events, default=math.nan) - begin
    num_prompt, num_output = sum(r.num_prompt for r in done), sum(r.num_output for r in done)
    cached = sum(r.num_cached_tokens for r in done)
    found: dict[str, Any] = {
        "num_requests": len(requests),
        "num_finished": len(done),
        "num_failed": errors.total(),
        "errors": dict(sorted(errors.items())),
        "seconds": _plain(seconds),
        "requests_per_s": _rate(len(done), seconds),
        "prompt_tokens_per_s": _rate(num_prompt, seconds),
        "output_tokens_per_s": _rate(num_output, seconds),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "num_cached_tokens": cached,
        "hit_rate": cached / num_prompt if num_prompt else None,
        # Little's law: the mean number of requests in the system.
        "mean_concurrency": _rate(sum(r.e2e_s for r in done), seconds),
        "ttft_s": spread([r.ttft_s for r in done]),
        "tpot_s": spread([r.tpot_s for r in done]),
        "itl_s": spread([gap for r in done for gap in r.gaps_s]),
        "e2e_s": spread([r.e2e_s for r in done]),
        "failures": _failures(requests, done, errors),
    }
    if limits is not None:
        good = sum(limits.met_by(request) for request in requests)
        found["goodput"] = {
            "limits": {name: value for name, value in dataclasses.asdict(limits).items() if value is not None},
            "share": good / len(requests) if requests else None,
            "requests_per_s": _rate(good, seconds),
        }
    return found


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Returns mean, percentiles by linear interpolation and maximum, leaving out NaN; None of no values."""
    array = np.array([value for value in values if not math.isnan(value)], float)
    if not len(array):
        return None
    percentiles = np.percentile(array, PERCENTILES).tolist()
    names = {f"p{percent}": value for percent, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(array.mean()), **names, "max": float(array.max())}


def flat(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a report by one key each: {"ttft_s": {"p50": 1}} gives {"ttft_p50_s": 1}."""
    found: dict[str, Any] = {}
    for key, value in report.items():
        if isinstance(value, Mapping):
            stem, unit = (key.removesuffix("_s"), "_s") if key.endswith("_s") else (key, "")
            found |= {f"{stem}_{part}{unit}": one for part, one in value.items() if isinstance(one, (int, float))}
        elif isinstance(value, (int, float)):
            found[key] = value
    return found


def table(report: Mapping[str, Any]) -> str:
    """Returns a report as aligned text, without a line break at the end."""
    errors = "".join(f"; {name}: {count:,}" for name, count in report["errors"].items())
    rates = [f"{_n(report[f'{what}_per_s'])} {what.replace('_', ' ')}/s" for what in _RATES]
    finished = f"{report['num_finished']:,} of {report['num_requests']:,} finished"
    lines = [
        f"requests      {finished} in {_n(report['seconds'])} s{errors}",
        f"throughput    {', '.join(rates)}",
    ]
    if (good := report.get("goodput")) is not None:
        limits = ", ".join(f"{name.removesuffix('_s').upper()} {value:g} s" for name, value in good["limits"].items())
        share = f"{good['share']:.1%} of the requests meet {limits}"
        lines.append(f"goodput       {_n(good['requests_per_s'])} requests/s; {share}")
    if report["hit_rate"] is not None:
        lines.append(f"prefix cache  {report['hit_rate']:.1%} of the prompt tokens")
    heads = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    lines.append(f"{'ms':6}" + "".join(f"{head:>10}" for head in heads))
    for name in ("ttft", "tpot", "itl", "e2e"):
        if (found := report[f"{name}_s"]) is not None:
            lines.append(f"{name.upper():6}" + "".join(f"{value * 1000:10,.1f}" for value in found.values()))
    return "\n".join([*lines, *(f"warning: {failure}" for failure in report["failures"])])


def _failures(requests: Sequence[RequestTimes], done: Sequence[RequestTimes], errors: Counter) -> list[str]:
    found = []
    if count := errors.total():
        names = ", ".join(f"{name} ({n:,})" for name, n in sorted(errors.items()))
        found.append(f"{count:,} of {len(requests):,} requests failed: {names}")
    if left := len(requests) - len(done) - errors.total():
        found.append(f"{left:,} of {len(requests):,} requests did not end")
    if grown := growth(done):
        found.append(f"the queue grows: {grown}")
    return found


def growth(done: Sequence[RequestTimes]) -> str:
    """Describes the growth of TTFT over finished requests, in sending order; empty if it does
    not grow, or if all were sent at once."""
    half = len(done) // 2
    if len({r.sent_s for r in done}) < 2:
        return ""
    waits = np.array([r.ttft_s for r in sorted(done, key=lambda r: (r.sent_s, r.index))])
    first, second = waits[:half].mean(), waits[half:].mean()
    typical = float(np.median([r.e2e_s for r in done]))
    if second > GROWTH * first and second - first > LEAST_GROWTH * typical:
        return f"mean TTFT {first:,.3g} s in the first half, {second:,.3g} s in the second"
    return ""


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
