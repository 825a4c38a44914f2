"""Health of servers and retries, by a clock that the tests hold."""

import random

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.health import Health, HealthSettings, ServerState, retry_wait_s


def ready(now=0.0, **settings):
    health = Health(HealthSettings(**settings), cold=False)
    assert health.weight(now) == 0
    health.probe(True, now)
    assert health.state(now) is ServerState.READY and health.weight(now) == 1
    return health


def test_a_cold_server_warms_up():
    health = Health()
    assert health.state(0.0) is ServerState.DEAD and health.probe(False, 1.0) is ServerState.DEAD
    assert health.probe(True, 2.0) is ServerState.WARMING
    assert [health.weight(now) for now in (2.0, 7.0, 11.0, 12.0)] == [0.05, 0.5, 0.9, 1.0]
    assert health.state(12.0) is ServerState.READY


def test_three_probes_without_an_answer_mean_death_and_it_comes_back_cold():
    health = ready()
    assert [health.probe(None, n) for n in (1.0, 2.0)] == [ServerState.READY] * 2
    health.probe(True, 3.0)
    assert [health.probe(None, n) for n in (4.0, 5.0, 6.0)] == [ServerState.READY, ServerState.READY, ServerState.DEAD]
    assert health.weight(6.0) == 0 and health.probe(True, 9.0) is ServerState.WARMING


def test_parts_of_answers_keep_a_server_alive_that_is_late_for_probes():
    health = ready()
    for n in range(9):
        assert health.probe(None, n) is ServerState.READY
        health.sent()
    assert [health.probe(None, n) for n in (10.0, 11.0, 12.0)][1:] == [ServerState.READY, ServerState.DEAD]
    health.sent()
    assert health.state(13.0) is ServerState.DEAD


def test_a_server_that_says_it_is_not_ready_drains():
    health = ready()
    assert health.probe(False, 1.0) is ServerState.DRAINING and health.weight(1.0) == 0
    assert health.probe(True, 2.0) is ServerState.READY and health.weight(2.0) == 1


def test_a_request_is_tried_again_twice_and_later_each_time():
    dice = random.Random(0)
    for status in (None, 429, 502, 503, 504):
        first, second = (retry_wait_s(tries, status, 2, dice) for tries in (1, 2))
        assert 0.05 <= first <= 0.075 and 0.1 <= second <= 0.15
        assert retry_wait_s(3, status, 2, dice) is None
    assert all(retry_wait_s(1, status, 2, dice) is None for status in (200, 400, 401, 404, 500))


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="max_missed is 0, must be an integer from 1"):
        HealthSettings(max_missed=0)
