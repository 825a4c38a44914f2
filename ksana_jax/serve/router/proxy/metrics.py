"""Prometheus metrics of the proxy, named `router:`. All of them are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable

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
        policy, servers = type(fleet.router.policy).__name__, fleet.servers.values()
        choices = ((name_of(url), policy, n) for url, n in counts.choices.items())
        yield _counter("choices", "requests sent to a server", choices, "server", "policy")
        yield _counter("decision_seconds", "time taken by all choices", [(fleet.decision_s,)])
        yield _counter("prompt_tokens", "prompt tokens sent", [(counts.prompt_tokens,)])
        yield _counter("hit_tokens_expected", "prompt tokens expected in the cache", [(counts.expected_tokens,)])
        text = "prompt tokens that servers reported as cached"
        yield _counter("hit_tokens_reported", text, [(counts.reported_tokens,)])
        text = "expected tokens of the requests that have a report"
        yield _counter("hit_tokens_expected_of_reported", text, [(counts.reported_of,)])
        yield _counter("retries", "requests sent to another server", fleet.num_retries.items(), "reason")
        yield _counter("broken_streams", "streams that ended with an error", [(fleet.num_broken,)])
        yield _gauge("requests_queued", "requests that wait in the proxy", [(self._num_queued,)])
        running = [(s.name, len(s.carried)) for s in servers]
        yield _gauge("requests_running", "requests that a server has", running, "server")
        text = "requests in the ledger and not under way, or the reverse"
        error = abs(len(fleet.router.ledger.live) - sum(count for _, count in running))
        yield _gauge("ledger_unmatched", text, [(error,)])
        states = ((s.name, state, float(fleet.state(s) == state)) for s in servers for state in STATES)
        yield _gauge("server_state", "1 for the state that a server is in", states, "server", "state")


def _counter(name: str, text: str, values: Iterable[tuple], *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"router:{name}", text, labels=labels), values)


def _gauge(name: str, text: str, values: Iterable[tuple], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"router:{name}", text, labels=labels), values)


def name_of(url: str) -> str:
    """Returns a server's name in labels and messages."""
    return url.partition("://")[2]


def _filled(family, values: Iterable[tuple]) -> Metric:
    for *labels, value in values:
        family.add_metric(labels, value)
    return family
