"""The largest rate of arrival under which objectives are kept, by bisection. Knows rates and times of requests.

Every rate serves the same requests with scaled gaps (common random numbers), so that two rates differ in nothing else.
The rates searched are powers of one ratio, so searches for several objectives share their runs.

Source: the capacity search of Vidur, arXiv:2405.05465; goodput of DistServe, arXiv:2401.09670.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.simulator.slo import SLO, SLOResult
from ksana_jax.serve.workload.report import RequestTimes

# Rates are tried up and down from the first to this multiple of it, or its inverse.
_WIDEST = 2.0**12

# Serves a workload at a rate in requests/s.
Run = Callable[[float], Sequence[RequestTimes]]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A run at one rate, in requests/s, and its result."""

    rate: float
    verdict: SLOResult


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The largest rate found that keeps the objectives, and the smallest above it that does not.

    rate: requests/s; 0 if no searched rate keeps them. failed: the probe just above it, with its reasons.
    probes: by rising rate.
    """

    rate: float
    failed: Probe
    probes: tuple[Probe, ...]


class Search:
    """Searches for capacities with the runs of one workload.

    Args:
      run: serves the workload at a rate in requests/s and returns the times of all requests, in any order.
      first: first rate of the search; the closer, the fewer runs.
      ratio: of neighbouring rates, which is the resolution of the result.
      warm_up: share of the requests that arrive first and are not judged.
    """

    def __init__(self, run: Run, first: float, *, ratio: float = 1.02, warm_up: float = 0.1):
        self._run, self._first, self._ratio, self._warm_up = run, first, ratio, warm_up
        self._widest = math.ceil(math.log(_WIDEST, ratio))
        self._double = math.ceil(math.log(2, ratio))
        self.runs: dict[float, list[RequestTimes]] = {}

    def requests(self, rate: float) -> list[RequestTimes]:
        """Returns the judged requests of the run at a rate, which is done once."""
        if rate not in self.runs:
            found = sorted(self._run(rate), key=lambda request: (request.sent_s, request.index))
            self.runs[rate] = found[math.ceil(len(found) * self._warm_up) :]
        return self.runs[rate]

    def capacity(self, slo: SLO) -> Capacity:
        """Returns the largest rate that keeps the objectives.

        Rates double or halve until one keeps them and one does not, then the exponent is bisected. A rate whose queue
        grows, or whose requests do not all end, keeps none: see `SLO.judge`.

        Raises:
          ConfigError: the highest rate that is tried keeps them.
        """
        probes: dict[int, Probe] = {}

        def met(exponent: int) -> bool:
            if exponent not in probes:
                rate = self._first * self._ratio**exponent
                probes[exponent] = Probe(rate, slo.judge(self.requests(rate)))
            return probes[exponent].verdict.met

        low = high = 0
        if met(0):
            while high < self._widest and met(high):
                low, high = high, high + self._double
            if met(high):
                judged = len(self.requests(probes[high].rate))
                raise ConfigError(
                    f"every rate up to {probes[high].rate:,.4g} requests/s keeps {slo.text}: {judged:,} requests are "
                    "judged, give more of them or tighter objectives"
                )
        else:
            while low > -self._widest and not met(low):
                low, high = low - self._double, low
            if not met(low):
                return Capacity(0.0, probes[low], tuple(probes[k] for k in sorted(probes)))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if met(middle) else (low, middle)
        return Capacity(probes[low].rate, probes[high], tuple(probes[k] for k in sorted(probes)))
