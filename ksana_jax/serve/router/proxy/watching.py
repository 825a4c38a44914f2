"""A server's own figures of its load, from its `GET /metrics`. They are shown next to the ledger and decide nothing.

Loads that are polled are old: all requests of a burst would see the same. They tell whether the ledger is right: load
beyond it came from other senders, or counts each sample of a request; missing load ended without notice.
"""

from __future__ import annotations

import dataclasses
import re

# vLLM's names. A server with several engines has a sample of each.
SAMPLES = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^\n]*\})? ([^ \n]+)", re.MULTILINE
)


@dataclasses.dataclass(frozen=True, slots=True)
class OwnFigures:
    """A server's report of its state.

    running, waiting: its requests. kv_usage: share of its KV pool in use, of the fullest engine; None if it has none.
    ledger_error: its requests minus those in the router's ledger; those that began or ended while it answered do not
      count. at_s: when it answered, on the proxy's clock.
    """

    running: int
    waiting: int
    kv_usage: float | None
    ledger_error: int
    at_s: float


def read_figures(metrics: str, ledger: tuple[int, int], at_s: float) -> OwnFigures | None:
    """Returns the figures in a server's metrics; None if they do not say how many requests it has.

    Args:
      metrics: in Prometheus' text format.
      ledger: the server's requests in the ledger before it was asked, and after.
    """
    found: dict[str, list[float]] = {}
    for name, value in SAMPLES.findall(metrics):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            return None
    if "num_requests_running" not in found:
        return None
    running, waiting = (int(sum(found.get(f"num_requests_{name}", ()))) for name in ("running", "waiting"))
    nearest = min(max(running + waiting, min(ledger)), max(ledger))
    usage = max(found.get("kv_cache_usage_perc", ()), default=None)
    return OwnFigures(running, waiting, usage, running + waiting - nearest, at_s)
