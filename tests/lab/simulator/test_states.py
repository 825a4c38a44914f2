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
HOST = FEW | {"host_cache_bytes": 2**27}


@pytest.mark.parametrize(("settings", "cached"), [({}, 0), (EVERY, 32)], ids=str)
def test_a_prompt_that_leaves_another_one_begins_at_a_snapshot(settings, cached):
    items = [item(0, 0.0, 60, 2, seed=7), item(1, 5.0, 40, 2, seed=7)]
    run = simulate(items, HYBRID, config(enable_prefix_caching=True, **settings), AffineCost(0.01, 0.001))
    assert run.served[1].num_cached_tokens == cached


@pytest.mark.parametrize(
    ("settings", "cached"), [(FEW, 0), (HOST, 48), (HOST | {"disk_cache_dir": "x", "disk_cache_bytes": 2**27}, 48)]
)
def test_a_snapshot_that_was_replaced_comes_back_from_the_host(settings, cached):
    items = [item(n, 5.0 * n, 60, 2, seed=n % 3) for n in range(4)]
    cost = AffineCost(0.01, 0.001, move=MoveCost(loaded=TransferLink(0.25)))
    run = simulate(items, HYBRID, config(enable_prefix_caching=True, async_scheduling=False, **settings), cost)
    last = run.served[3]
    assert last.num_cached_tokens == cached
    if cached:  # blocks are on the device still: only the state is loaded
        assert last.first_token_s - last.arrival_s == pytest.approx(0.25 + 0.01 + 12 * 0.001)
