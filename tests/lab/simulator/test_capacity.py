"""Capacity search against queues whose capacity is known, and what objectives make of a run."""

import dataclasses
import math

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.simulator.capacity import Search
from ksana_jax.lab.simulator.slo import SLO
from ksana_jax.serve.workload.report import RequestTimes


def single_server(gaps: np.ndarray, service_s: float, rate: float) -> list[RequestTimes]:
    """A first-come first-served server with constant service times: M/D/1 where the gaps are exponential."""
    found, free = [], 0.0
    for index, arrival in enumerate(np.cumsum(gaps).tolist()):
        begins = max(arrival / rate, free)
        free = begins + service_s
        found.append(RequestTimes(index, arrival / rate, begins, free, num_output=1))
    return found


@pytest.fixture(scope="module")
def gaps():
    return np.random.default_rng(0).exponential(1.0, 5_000)


def times_of(ttft, tpot, num_output=11):
    return [
        RequestTimes(i, float(i), i + first, i + first + 10 * each, num_output=num_output)
        for i, (first, each) in enumerate(zip(ttft, tpot, strict=True))
    ]


def test_capacity_of_a_single_server_is_that_of_queueing_theory(gaps):
    # Poisson arrivals find a server idle with probability 1 - rate x service time: 40 % of them at a rate of 0.6.
    slo = SLO.of({"ttft": 1e-9, "attainment": 0.4})
    found = Search(lambda rate: single_server(gaps, 1.0, rate), 0.01, warm_up=0).capacity(slo)
    assert found.rate == pytest.approx(0.6, rel=0.03)
    assert found.rate < found.failed.rate <= found.rate * 1.0201


def test_the_search_begins_anywhere_and_finds_the_same(gaps):
    found = [
        Search(lambda rate: single_server(gaps[:1000], 1.0, rate), first).capacity(SLO.of("e2e=4")).rate
        for first in (1e-2, 0.5, 10.0)
    ]
    assert max(found) / min(found) <= 1.0201


def test_searches_for_several_objectives_share_their_runs(gaps):
    rates = []
    search = Search(lambda rate: (rates.append(rate), single_server(gaps[:3000], 1.0, rate))[1], 0.1)
    loose, tight = search.capacity(SLO.of("e2e_p90=6")).rate, search.capacity(SLO.of("e2e_p90=2")).rate
    assert tight < loose and len(rates) == len(set(rates)) < 20


def test_a_queue_that_grows_keeps_no_objective(gaps):
    # Twice as much arrives as is served: the limit would be kept, the queue would not.
    verdict = SLO.of("e2e_p50=1e9").judge(single_server(gaps[:2000], 1.0, 2.0))
    assert not verdict.met and "queue grows" in verdict.reasons[0]
    capacity = Search(lambda rate: single_server(gaps[:2000], 1.0, rate), 0.3).capacity(SLO.of("e2e_p50=1e9"))
    assert capacity.rate < 1.1 and "queue grows" in capacity.failed.verdict.reasons[0]


def test_unfinished_requests_are_named():
    times = times_of([1.0] * 10, [0.1] * 10)
    for index in (3, 7):
        times[index] = dataclasses.replace(times[index], finished_s=math.nan)
    verdict = SLO.of("ttft=2").judge(times)
    assert not verdict.met and "not finished: 3, 7" in verdict.reasons
    assert verdict.values["attainment"] == 0.8
    assert SLO.of("ttft_p99=2").judge(times).values["ttft_p99"] == math.inf


def test_a_request_must_keep_all_of_its_limits():
    # Of ten, three keep each limit but not the other.
    times = times_of([3, 3, 3] + [1] * 7, [0.1] * 4 + [0.3] * 3 + [0.1] * 3)
    assert SLO.of("ttft=2").judge(times).values["attainment"] == 0.7
    assert SLO.of("ttft=2,tpot=0.2").judge(times).values["attainment"] == pytest.approx(0.4)
    assert SLO.of("ttft=2,tpot=0.2,attainment=0.4").judge(times).met


def test_percentiles_are_limits_of_their_own():
    times = times_of(np.linspace(1, 0, 101).tolist(), [0.1] * 101)
    assert SLO.of("ttft_p99=0.99,tpot_p99=0.1001").judge(times).met
    verdict = SLO.of({"ttft_p50": 0.4}).judge(times)
    assert verdict.reasons == ("ttft_p50 is 0.5 s, over 0.4 s",)


def test_answers_of_one_token_have_no_time_per_token():
    assert SLO.of("tpot=0.01").judge(times_of([1.0] * 4, [1.0] * 4, num_output=1)).met


def test_objectives_that_no_rate_keeps_have_no_capacity(gaps):
    found = Search(lambda rate: single_server(gaps[:200], 1.0, rate), 1.0).capacity(SLO.of("e2e=0.5"))
    assert found.rate == 0 and "attainment is 0.0%, under 90%" in found.failed.verdict.reasons


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "no limit"),
        ("tftt=2", "unknown metric 'tftt'; the nearest is 'ttft'"),
        ("ttft_p99", "must be NAME=SECONDS"),
        ("ttft_p99=0", "slo.ttft_p99 is 0.0, must be a finite number above 0"),
        ("ttft_p101=1", "must be a number from 0 to 100"),
        ("ttft=1,attainment=1.5", "slo.attainment is 1.5"),
        ({"ttft": "2"}, "slo.ttft is '2'"),
    ],
)
def test_bad_objectives_are_refused(given, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        SLO.of(given)
