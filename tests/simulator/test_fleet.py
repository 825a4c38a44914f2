"""Fleets of real engines behind the real router, on one clock."""

import dataclasses
import math

import numpy as np
import pytest

from ksana_jax.errors import ConfigError
from ksana_jax.router.policies import Policy
from ksana_jax.simulator import fleet
from ksana_jax.simulator.polled import Polled
from ksana_jax.simulator.run import simulate
from ksana_jax.workload import read_workload
from ksana_jax.workload.report import summarise
from tests.simulator.fleets import CONFIG, COST, MODEL, serve, sessions


class To(Policy):
    """Sends every request to one server, and counts those under way there."""

    def __init__(self, server=0):
        self.server, self.seen = server, []

    def choose(self, request, view):
        self.seen.append(int(view.ledger.requests[self.server]))
        return self.server


def test_one_server_of_a_fleet_does_what_an_engine_alone_does():
    given = {"kind": "synthetic", "num_requests": 60, "rate": 5.0, "prompt": [10, 900], "output": [1, 90]}
    workload = read_workload(given).make(MODEL.vocab_size)
    run, alone = serve("full", workload, 3, To(1)), simulate(workload.items, MODEL, CONFIG, COST)
    for got, one in zip(run.requests, alone.served, strict=True):
        assert got.num_output == one.num_output and got.num_cached_tokens == one.num_cached_tokens
        assert got.e2e_s == pytest.approx(one.finished_s - one.arrival_s + 2 * fleet.NETWORK_S)
    assert run.busy_s == [0, pytest.approx(alone.busy_s), 0]


def test_equal_seeds_give_equal_reports_and_other_seeds_other_ones():
    workload = sessions(3, 1.0, 30)
    first, second, other = (serve("full", workload, 3, "random", seed=seed) for seed in (1, 1, 2))
    assert first.requests == second.requests and summarise(first.requests) == summarise(second.requests)
    assert first.requests != other.requests


def test_sessions_send_their_next_turn_when_the_last_has_arrived():
    run = serve("full", sessions(2, 1.0, 40), 2, "min_ttft")
    by_index = {trip.item.index: trip for trip in run.trips}
    later = [trip for trip in run.trips if trip.item.after is not None]
    assert len(later) > 10
    for trip in later:
        assert trip.item.after is not None
        assert trip.sent_s == pytest.approx(by_index[trip.item.after].finished_s + trip.item.think_s)


def test_the_router_hears_of_ends_when_they_have_crossed_the_network():
    gap = 0.0005  # less than the network takes: the first request is under way when the second comes
    items = read_workload({"kind": "synthetic", "num_requests": 3, "rate": None, "prompt": 10, "output": 1}).make(
        32_000
    )
    timed = [dataclasses.replace(item, arrival_s=[0.0, gap, 5.0][i]) for i, item in enumerate(items.items)]
    policy = To()
    serve("full", dataclasses.replace(items, items=timed), 1, policy)
    assert policy.seen == [0, 1, 0]


def test_a_request_that_no_server_can_take_is_refused_and_named():
    config = dataclasses.replace(CONFIG, max_model_len=2048)
    workload = read_workload(
        {"kind": "synthetic", "num_requests": 20, "rate": 5, "prompt": [1500, 2500], "output": 5}
    ).make(32_000)
    for kind in ("full", "light"):
        run = serve(kind, workload, 2, "least_work", config)
        too_long = {item.index for item in workload.items if item.num_prompt >= 2048}
        assert {r.index for r in run.requests if r.error == "refused"} == too_long != set()
        assert "refused" in summarise(run.requests)["failures"][0]
        assert all(not math.isnan(r.finished_s) for r in run.requests)


def test_hits_follow_the_policy():
    # A fleet's caches hold what its router sends them: min_ttft returns conversations to where they were.
    workload = sessions(3, 1.0, 120)
    hits = {p: summarise(serve("full", workload, 4, p).requests)["hit_rate"] for p in ("round_robin", "min_ttft")}
    assert hits["min_ttft"] > 1.5 * hits["round_robin"]


def test_polled_loads_are_those_of_the_last_poll():
    workload = read_workload({"kind": "synthetic", "num_requests": 40, "rate": None, "prompt": 400, "output": 20}).make(
        32_000
    )
    run = serve("full", workload, 4, "least_work")
    assert {sum(t.server == s for t in run.trips) for s in range(4)} == {10}
    # All 40 come at once and see four idle servers: ties are broken at random.
    polled = serve("full", workload, 4, Polled("least_work", 1.0))
    assert max(sum(t.server == s for t in polled.trips) for s in range(4)) > 10
    with pytest.raises(ConfigError, match=r"every_s is 0, must be a finite number above 0"):
        Polled("least_work", 0)


def test_balance_is_the_busiest_servers_work_over_the_mean():
    run = fleet.FleetRun([], [1.0, 3.0], 4.0)
    assert run.imbalance == 1.5 and fleet.FleetRun([], [0.0, 0.0], 0.0).imbalance == 1.0


def test_chains_are_equal_as_far_as_texts_are():
    chains = fleet.Chains(64)
    items = sessions(1, 1.0, 40).items
    texts = {item.index: np.concatenate([item.tokens(), item.output_tokens()]) for item in items}
    for a in items:
        for b in items:
            n = min(len(texts[a.index]), len(texts[b.index])) // 64
            same = np.cumprod((texts[a.index][: n * 64] == texts[b.index][: n * 64]).reshape(n, 64).all(1)).sum()
            equal = [x == y for x, y in zip(chains.of(a), chains.of(b), strict=False)]
            assert equal == [True] * int(same) + [False] * (n - int(same))
