"""Fleets of real engines behind the real router, on one clock."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import per_layer
from ksana_jax.lab.simulator import fleet
from ksana_jax.lab.simulator.fitted import PHASES, FittedCost, ShapeTimes
from ksana_jax.lab.simulator.one_engine import Served, SimEngine
from ksana_jax.lab.simulator.run import simulate
from ksana_jax.scheduler.step.ladders import all_shapes, make_buckets
from ksana_jax.serve.router.policies import Policy
from ksana_jax.serve.router.router import Router
from ksana_jax.serve.router.settings import RouterSettings
from ksana_jax.serve.workload import read_workload
from ksana_jax.serve.workload.report import summarise
from tests.lab.simulator.fleets import CONFIG, COST, MODEL, serve, sessions


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
    run, alone = serve(workload, 3, To(1)), simulate(workload.items, MODEL, CONFIG, COST)
    for got, one in zip(run.requests, alone.served, strict=True):
        assert got.num_output == one.num_output and got.num_cached_tokens == one.num_cached_tokens
        assert got.e2e_s == pytest.approx(one.finished_s - one.arrival_s + 2 * fleet.NETWORK_S)
    assert run.busy_s == [0, pytest.approx(alone.busy_s), 0]


def test_equal_seeds_give_equal_reports_and_other_seeds_other_ones():
    workload = sessions(3, 1.0, 30)
    first, second, other = (serve(workload, 3, "random", seed=seed) for seed in (1, 1, 2))
    assert first.requests == second.requests and summarise(first.requests) == summarise(second.requests)
    assert first.requests != other.requests


def test_sessions_send_their_next_turn_when_the_last_has_arrived():
    run = serve(sessions(2, 1.0, 40), 2, "min_ttft")
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
    serve(dataclasses.replace(items, items=timed), 1, policy)
    assert policy.seen == [0, 1, 0]


def test_a_request_that_no_server_can_take_is_refused_and_named():
    config = dataclasses.replace(CONFIG, max_model_len=2048)
    workload = read_workload(
        {"kind": "synthetic", "num_requests": 20, "rate": 5, "prompt": [1500, 2500], "output": 5}
    ).make(32_000)
    run = serve(workload, 2, "least_work", config)
    too_long = {item.index for item in workload.items if item.num_prompt >= 2048}
    assert {r.index for r in run.requests if r.error == "refused"} == too_long != set()
    assert "refused" in summarise(run.requests)["failures"][0]
    assert all(not math.isnan(r.finished_s) for r in run.requests)


def test_a_fleet_whose_steps_were_not_measured_is_refused_with_their_shapes():
    workload = read_workload(
        {"kind": "synthetic", "num_requests": 40, "rate": 20, "prompt": [10, 900], "output": [1, 40]}
    ).make(MODEL.vocab_size)
    with pytest.raises(ConfigError, match=r"% of the time are steps of \d+ shapes .*not measured.*\(\d+ steps\)"):
        serve(workload, 2, "least_work", cost=measured_shapes(SMALL))
    run = serve(workload, 2, "least_work", cost=measured_shapes(CONFIG))
    assert len(run.trips) == 40


SMALL = dataclasses.replace(CONFIG, max_num_batched_tokens=128, max_num_seqs=4)


def measured_shapes(config):
    """Costs that know the shapes of an engine's steps up to its limits, and no others."""
    config = config.for_model(MODEL, per_layer(MODEL.pattern, MODEL.num_layers))
    shapes = [ShapeTimes(shape, 5, 0.01, 1.0, (0.9, 1.1)) for shape in all_shapes(make_buckets(config, "cpu"))]
    return FittedCost(phases={phase: {"step": 0.01, "tokens": 1e-4} for phase in PHASES}, shapes=shapes)


class Loses(SimEngine):
    """A server that never answers its seventh request."""

    def submit(self, item, **settings):
        self.num_taken = getattr(self, "num_taken", 0) + 1
        return Served(item, self.events()) if self.num_taken == 7 else super().submit(item, **settings)


def test_a_request_that_does_not_end_is_named_with_its_server():
    workload, chains = (
        read_workload({"kind": "synthetic", "num_requests": 20, "rate": 5}).make(32_000),
        fleet.Chains(64),
    )
    router = Router(range(2), To(1), RouterSettings(64, 9300, pool_tokens=768 * 64), 0)
    with pytest.raises(AssertionError, match=r"1 of 20 requests did not end: 6 \(server 1\)"):
        fleet.serve(workload.items, functools.partial(Loses, MODEL, CONFIG, cost=COST), router, chains)


class Crowds(To):
    """Sends every third request to server 0, and the rest to the other servers in rotation."""

    def choose(self, request, view):
        number = int(request.request_id)
        return 0 if number % 3 == 0 else 1 + number // 3 % (len(view.ledger.requests) - 1)


def test_a_server_whose_queue_grows_is_named_with_its_times():
    given = {"kind": "synthetic", "num_requests": 900, "rate": 60, "prompt": 500, "output": 10}
    workload = read_workload(given).make(MODEL.vocab_size)
    [said] = fleet.growing(serve(workload, 4, Crowds()).trips)
    assert said.startswith("the queue of 1 of 4 servers grows: server 0 (mean TTFT ")
    assert fleet.growing(serve(workload, 4, "least_work").trips) == []


def test_hits_follow_the_policy():
    # A fleet's caches hold what its router sends them: min_ttft returns conversations to where they were.
    workload = sessions(3, 1.0, 120)
    hits = {p: summarise(serve(workload, 4, p).requests)["hit_rate"] for p in ("round_robin", "min_ttft")}
    assert hits["min_ttft"] > 1.5 * hits["round_robin"]


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
