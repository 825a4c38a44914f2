"""Queues with known answers, and what a comparison of decisions finds."""

import dataclasses

import numpy as np
import pytest

from experiments.simulator.predicting import Check
from ksana_jax.lab.simulator.cost import AffineCost
from ksana_jax.lab.simulator.run import InSystem, check, simulate
from tests.lab.simulator.items import MODEL, config, item
from tests.lab.simulator.queues import erlang_c, known_answers


@pytest.mark.soak
def test_queues_have_their_known_times_within_2_percent():
    found = known_answers()
    assert len(found) == 6 and all(one.passed for one in found), [str(one) for one in found]


def test_one_server_of_many_is_a_queue_of_one():
    assert erlang_c(0.7, 1) == pytest.approx(0.7)


def test_a_failed_check_says_so():
    failed = Check("TPOT", 0.010, 0.012, 0.05)
    assert not failed.passed and "FAIL" in str(failed) and "+20.00% of 5%" in str(failed)


def single_steps(count: int, rate: float):
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    return [item(i, float(at), 1, 1) for i, at in enumerate(arrivals)]


@pytest.mark.soak
def test_an_engine_of_one_row_is_a_queue_with_constant_service():
    # M/D/1 at a load of 0.5 through the real scheduler: W = S + rho S / (2 (1 - rho)).
    settings = config(max_num_seqs=1, async_scheduling=False)
    run = simulate(single_steps(20_000, 0.5), MODEL, settings, AffineCost(1.0, 0))
    assert run.report()["e2e_s"]["mean"] == pytest.approx(1.5, rel=0.02)


def test_time_in_which_nobody_works_although_there_are_requests_is_an_error():
    run = simulate(single_steps(20, 0.5), MODEL, config(), AffineCost(1.0, 0))
    counted = InSystem()
    for one in sorted(run.served, key=lambda s: s.arrival_s):
        counted.change(1, one.arrival_s)
        counted.change(-1, one.finished_s)
    with pytest.raises(AssertionError, match="host, device and disk worked"):
        check(dataclasses.replace(run, busy_s=run.busy_s / 2), counted, len(run.served))


def test_an_end_before_its_first_token_is_an_error():
    run = simulate(single_steps(3, 0.5), MODEL, config(), AffineCost(1.0, 0))
    run.served[1].finished_s = run.served[1].first_token_s - 0.5
    with pytest.raises(AssertionError, match="request 1 has times out of order"):
        check(run, InSystem(), 3)
