"""Prometheus metrics of the proxy, named `router:`. All of them are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ksana_jax.serve.router.proxy.fleet import Fleet

STATES = ("ready", "warming", "draining", "dead")


def exposition(fleet: Fleet, num_queued: int) -> str:
    """Returns all metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Metrics(fleet, num_queued))
    return generate_latest(registry).decode()


class _Metrics(Collector):
    def __init__(self, fleet: Fleet, num_queued: int):
        self._fleet, self._num_queued = fleet, num_queued

    def collect(self) -> Iterable[Metric]:
        fleet, counts = self._fleet, self._fleet.router.counts
        policy = type(fleet.router.policy).__name__
        yield self._counter(
            "choices",
            "requests sent to a server",
            ("server", "policy"),
            ((name_of(url), policy, n) for url, n in counts.choices.items()),
        )
        yield self._counter("decision_seconds", "time taken by all choices", (), [(fleet.decision_s,)])
        yield self._counter("prompt_tokens", "prompt tokens sent", (), [(counts.prompt_tokens,)])
        expected, reported = "hit_tokens_expected", "hit_tokens_reported"
        yield self._counter(expected, "prompt tokens expected in the cache", (), [(counts.expected_tokens,)])
        yield self._counter(reported, "prompt tokens that servers reported as cached", (), [(counts.reported_tokens,)])
        text = "expected tokens of the requests that have a report"
        yield self._counter("hit_tokens_expected_of_reported", text, (), [(counts.reported_of,)])
        retries = ((reason, n) for reason, n in fleet.num_retries.items())
        yield self._counter("retries", "requests sent to another server", ("reason",), retries)
        yield self._counter("broken_streams", "streams that ended with an error", (), [(fleet.num_broken,)])
        yield self._gauge("requests_queued", "requests that wait in the proxy", (), [(self._num_queued,)])
        servers = fleet.servers.values()
        running = ((s.name, len(s.carried)) for s in servers)
        yield self._gauge("requests_running", "requests that a server has", ("server",), running)
        carried = sum(len(s.carried) for s in servers)
        error = abs(len(fleet.router.ledger.live) - carried)
        text = "requests in the ledger and not under way, or the reverse"
        yield self._gauge("ledger_unmatched", text, (), [(error,)])
        states = ((s.name, state, float(fleet.state(s) == state)) for s in servers for state in STATES)
        yield self._gauge("server_state", "1 for the state that a server is in", ("server", "state"), states)

    def _counter(self, name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple]) -> Metric:
        return _filled(CounterMetricFamily(f"router:{name}", text, labels=labels), values)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple]) -> Metric:
        return _filled(GaugeMetricFamily(f"router:{name}", text, labels=labels), values)


def name_of(url: str) -> str:
    """Returns a server's name in labels and messages."""
    return url.partition("://")[2]


def _filled(family, values: Iterator | Iterable[tuple]) -> Metric:
    for *labels, value in values:
        family.add_metric(labels, value)
    return family
