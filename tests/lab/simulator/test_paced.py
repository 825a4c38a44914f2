"""An engine with a paced device: a real host, and steps that wait as long as costs say."""

import time
import types

import numpy as np
import pytest

from experiments.simulator.paced import pace
from ksana_jax.core.config import ConfigError
from ksana_jax.core.request import RequestInput
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.engine import Engine
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import AffineCost, HostCost
from ksana_jax.lab.simulator.executor import SimExecutor
from ksana_jax.lab.simulator.measuring import exactly, serve, with_known_lengths
from ksana_jax.lab.simulator.run import simulate
from ksana_jax.scheduler.step.builder import BatchBuilder
from tests.lab.simulator.items import MODEL, config, drawn_items

COST = AffineCost(0.010, 0.001, pair_s=1e-5)


class Passing:
    """A time that passes in sleep, and a little whenever somebody looks at it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-8
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def sleeps_by(monkeypatch, sleep) -> None:
    """Lets the paced device alone, and no other thread, sleep in another way."""
    monkeypatch.setattr("experiments.simulator.paced.time", types.SimpleNamespace(sleep=sleep))


def engine(clock=time.perf_counter, **settings) -> Engine:
    given = config(**settings)
    nobody = SimExecutor(VirtualClock(), COST.start(), [MODEL.pattern] * MODEL.num_layers, 4, 64)
    if not given.host_cache_bytes:
        nobody.host_blocks = None  # type: ignore[assignment]
    return build_engine(MODEL, None, given, executor=nobody, clock=clock)


def test_requests_take_as_long_as_in_a_simulation_of_a_host_that_takes_no_time(monkeypatch):
    passing = Passing()
    sleeps_by(monkeypatch, passing.sleep)
    items = with_known_lengths(drawn_items(12, rate=20.0))
    paced = engine(passing, async_scheduling=False)
    pace(paced, COST)
    real = serve(paced, items)
    simulated = simulate(items, MODEL, config(async_scheduling=False), COST).served
    for one, other in zip(real, simulated, strict=True):
        assert one.num_output == other.num_output
        assert one.first_token_s == pytest.approx(other.first_token_s, abs=1e-3)
        assert one.finished_s == pytest.approx(other.finished_s, abs=1e-3)


def test_what_the_costs_say_of_the_host_is_not_waited_for(monkeypatch):
    ends = []
    for host in (HostCost(), HostCost(5.0)):
        passing = Passing()
        sleeps_by(monkeypatch, passing.sleep)
        paced = engine(passing)
        pace(paced, AffineCost(0.010, 0.0, host=host))
        serve(paced, with_known_lengths(drawn_items(3, rate=1000.0)))
        ends.append(passing.now)
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)


def test_steps_are_built_as_for_a_device(monkeypatch):
    built, build = [], BatchBuilder.build
    monkeypatch.setattr(BatchBuilder, "build", lambda *args: built.append(build(*args)) or built[-1])
    sleeps_by(monkeypatch, lambda seconds: None)
    paced = engine()
    pace(paced, COST)
    [request] = paced.new_requests([RequestInput(np.arange(3, 20, dtype=np.int32), exactly(5))])
    [*_, output] = paced.serve([request])
    assert len(output.outputs[0].token_ids) == 5
    assert [len(step.arrays.tokens) > 0 for step, _ in built] == [True] * 5


@pytest.mark.parametrize(
    "settings",
    [{"host_cache_bytes": 2**20}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}],
)
def test_tiers_and_drafts_are_refused(settings):
    with pytest.raises(ConfigError, match="neither a host tier nor speculative_config"):
        pace(engine(**settings), COST)
