"""Events that a listener of the tiers hears add up to the tiers' content."""

import random

import pytest

from ksana_jax.kv.tier import DEVICE, HOST
from tests.fakes import asking, make_engine, prompt_of, run
from tests.random_simulations import simulate
from tests.simulation import Simulation


class Mirror:
    """The blocks of each tier, from events alone."""

    def __init__(self):
        self.blocks, self.num_heard = {DEVICE: set(), HOST: set()}, 0
        self.num_used = 0

    def stored(self, node, level):
        assert node not in self.blocks[level], "stored twice"
        self.blocks[level].add(node)
        self.num_heard += 1

    def dropped(self, node, level):
        self.blocks[level].remove(node)
        self.num_heard += 1

    def used(self, node):
        assert node in self.blocks[DEVICE]
        self.num_used += 1

    def cleared(self):
        for blocks in self.blocks.values():
            blocks.clear()
        self.num_heard += 1

    def check(self, memory):
        assert self.blocks[DEVICE] == set(memory.device.node_of.values())
        assert self.blocks[HOST] == (set() if memory.host is None else set(memory.host.node_of.values()))


class Listening(Simulation):
    """A simulation with a listener."""

    num_heard = 0

    def start(self):
        super().start()
        self.mirror = Mirror()
        self.engine.memory.listeners.append(self.mirror)

    def check_step(self):
        super().check_step()
        self.mirror.check(self.engine.memory)
        self.num_heard += self.mirror.num_heard > 0
        assert self.mirror.num_used >= self.engine.memory.counters.hits_device

    def failing_step(self):
        super().failing_step()
        self.mirror.check(self.engine.memory)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_heard_in_a_simulation_is_what_the_tiers_have(seed):
    simulate(random.Random(seed), num_steps=40, kind=Listening)


def test_these_simulations_store_drop_and_clear():
    runs = [simulate(random.Random(seed), num_steps=40, kind=Listening) for seed in range(12)]
    assert sum(run.num_heard for run in runs) > 100
    seen = sum((run.seen for run in runs[1:]), start=runs[0].seen)
    assert seen["failed steps"] and seen["replaced"] and seen["replaced_host"]


def test_nobody_has_to_listen_and_a_listener_can_leave():
    engine, mirror = make_engine(caching=True), Mirror()
    engine.memory.listeners.append(mirror)
    engine.add_request(prompt_of(20), asking(max_tokens=4))
    run(engine)
    heard = mirror.num_heard
    assert heard
    engine.memory.listeners.remove(mirror)
    engine.add_request(prompt_of(20, 1), asking(max_tokens=4))
    run(engine)
    assert mirror.num_heard == heard
