"""Simulated engines of models with recurrent layers: slots, snapshots by policy, and their way to host and disk."""

import dataclasses

import pytest

from ksana_jax.core.recurrent import ShortConvSpec
from ksana_jax.lab.simulator.cost import AffineCost
from ksana_jax.lab.simulator.move_cost import MoveCost, TransferLink
from ksana_jax.lab.simulator.run import simulate
from tests.lab.simulator.items import MODEL, config, item

HYBRID = dataclasses.replace(MODEL, recurrent=ShortConvSpec((0,)))
EVERY = {"state_snapshots": {"method": "every", "blocks": 1, "num_slots": 8}}
FEW = {"max_num_seqs": 1, "state_snapshots": {"method": "prompt_end", "num_slots": 2}}
HOST = FEW | {"host_cache_bytes": 2**20}


def longer(index: int, arrival_s: float, text: int, num_prompt: int):
    """A request whose prompt begins with that of another one."""
    return item(index, arrival_s, num_prompt, 2, seed=text)


@pytest.mark.parametrize(("settings", "cached"), [({}, 0), (EVERY, 32)], ids=str)
def test_a_prompt_that_leaves_another_one_begins_at_a_snapshot(settings, cached):
    whole, shared = longer(0, 0.0, 7, 60), longer(1, 5.0, 7, 60)
    shared = dataclasses.replace(shared, num_prompt=40, prompt=lambda: whole.prompt()[:40])
    run = simulate([whole, shared], HYBRID, config(enable_prefix_caching=True, **settings), AffineCost(0.01, 0.001))
    assert run.served[1].num_cached_tokens == cached


@pytest.mark.parametrize(
    ("settings", "cached"), [(FEW, 0), (HOST, 48), (HOST | {"disk_cache_dir": "x", "disk_cache_bytes": 2**20}, 48)]
)
def test_a_snapshot_that_was_replaced_comes_back_from_the_host(settings, cached):
    items = [longer(0, 0.0, 1, 60), longer(1, 5.0, 2, 60), longer(2, 10.0, 3, 60), longer(3, 15.0, 1, 60)]
    cost = AffineCost(0.01, 0.001, move=MoveCost(loaded=TransferLink(0.25)))
    run = simulate(items, HYBRID, config(enable_prefix_caching=True, async_scheduling=False, **settings), cost)
    last = run.served[3]
    assert last.num_cached_tokens == cached
    if cached:  # blocks are on the device still: only the state is loaded
        assert last.first_token_s - last.arrival_s == pytest.approx(0.25 + 0.01 + 12 * 0.001)
