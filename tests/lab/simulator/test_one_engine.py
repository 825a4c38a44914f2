"""One engine under a virtual clock: times follow from costs, answers end where only the executor knows."""

import dataclasses
import math

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.kv.disk.block_file import BlockFacts, BlockFormat, file_bytes
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.layout import Leaf
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import AffineCost, HostCost, read_cost
from ksana_jax.lab.simulator.move_cost import MoveCost, TransferLink
from ksana_jax.lab.simulator.run import simulate
from ksana_jax.lab.simulator.sim_disk import SimDisk
from ksana_jax.lab.simulator.step_size import SizeBuilder, SizedStep
from ksana_jax.scheduler.step.builder import BatchBuilder
from tests.lab.simulator.items import MODEL, config, drawn_items, item


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token():
    cost = AffineCost(0.010, 0.001)
    run = simulate([item(0, 5.0, 20, 4)], MODEL, config(async_scheduling=False), cost)
    [served] = run.served
    assert served.num_output == 4 and served.finish_reason == "stop"
    assert served.first_token_s == pytest.approx(5.0 + 0.010 + 20 * 0.001)
    assert served.finished_s == pytest.approx(5.0 + 0.030 + 3 * 0.011)


@pytest.mark.parametrize(("slots", "loads"), [(1, 3), (2, 2)])
def test_adapters_of_clients_are_loaded_into_slots_before_their_rows_run(slots, loads):
    clients = ["a", "b", "a", ""]
    items = [dataclasses.replace(item(n, 5.0 * n, 20, 4), client=client) for n, client in enumerate(clients)]
    engine = config(async_scheduling=False, enable_lora=True, max_loras=slots, max_lora_rank=8)
    cost = AffineCost(0.010, 0.001, move=MoveCost(loaded=TransferLink(0.5)))
    run = simulate(items, MODEL, engine, cost)
    waits = [served.first_token_s - served.arrival_s for served in run.served]
    loaded = [0.5, 0.5, 0.5 * (loads == 3), 0.0]
    np.testing.assert_allclose(waits, [0.030 + seconds for seconds in loaded])


def test_a_client_whose_adapter_has_no_slot_waits_for_the_rows_that_hold_it():
    items = [dataclasses.replace(item(n, 0.0, 1, 9), client=client) for n, client in enumerate("ab")]
    engine = config(async_scheduling=False, enable_lora=True)
    run = simulate(items, MODEL, engine, AffineCost(0.01, 0, move=MoveCost(loaded=TransferLink(0.5))))
    first, second = run.served
    assert second.scheduled_s >= first.finished_s


def test_an_answer_longer_than_max_tokens_is_cut_off():
    run = simulate([item(0, 0.0, 20, 50, max_tokens=8)], MODEL, config(), AffineCost(0.01, 0))
    assert run.served[0].num_output == 8 and run.served[0].finish_reason == "length"


@pytest.mark.parametrize(("ahead", "expected"), [(False, 4 * (0.010 + 0.003)), (True, 4 * 0.010 + 0.003)])
def test_the_host_is_hidden_behind_the_device_only_if_it_schedules_ahead(ahead, expected):
    cost = AffineCost(0.010, 0, host=HostCost(0.003))
    run = simulate([item(0, 0.0, 1, 4)], MODEL, config(async_scheduling=ahead), cost)
    assert run.served[0].finished_s == pytest.approx(expected)


def test_a_host_that_is_slower_than_the_device_sets_the_pace_when_it_schedules_ahead():
    cost = AffineCost(0.001, 0, host=HostCost(0.005))
    run = simulate([item(0, 0.0, 1, 10)], MODEL, config(), cost)
    # Step k is submitted when the host has done its part for k steps; the first token waits for the second submission.
    assert run.served[0].finished_s == pytest.approx(11 * 0.005, rel=0.1)


def test_a_request_waits_for_the_end_of_the_step_under_way():
    items = [item(0, 0.0, 1, 30), item(1, 0.015, 1, 2)]
    run = simulate(items, MODEL, config(async_scheduling=False), AffineCost(0.010, 0))
    assert run.served[1].scheduled_s == pytest.approx(0.020)
    assert run.served[1].first_token_s == pytest.approx(0.030)


def test_the_next_turn_comes_when_the_one_before_has_ended_and_its_user_has_thought():
    items = [item(0, 1.0, 5, 3), item(1, math.nan, 9, 2, after=0, think_s=2.5, session=0)]
    run = simulate(items, MODEL, config(), AffineCost(0.01, 0))
    assert run.served[1].arrival_s == pytest.approx(run.served[0].finished_s + 2.5)


def test_a_request_that_can_never_be_served_is_refused_and_others_go_on():
    items = [item(0, 0.0, 200, 3), item(1, 0.0, 9, 2), item(2, math.nan, 9, 2, after=0)]
    run = simulate(items, MODEL, config(), AffineCost(0.01, 0))
    assert [s.finish_reason for s in run.served] == ["refused", "stop", "stop"]
    assert "max_model_len" in (run.served[0].error or "")
    assert run.report()["num_refused"] == 1


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 12}, {"num_blocks": 12, "enable_prefix_caching": True}])
@pytest.mark.parametrize("steps", [1, 3])
def test_equal_seeds_give_equal_bytes(settings, steps):
    items, cost = drawn_items(60, 300.0), AffineCost(0.004, 1e-5, 1e-8, 1e-6, host=HostCost(1e-4, 1e-6))
    runs = [simulate(items, MODEL, config(num_scheduler_steps=steps, **settings), cost) for _ in range(2)]
    assert runs[0].text() == runs[1].text() and runs[0].records == runs[1].records
    assert [s.num_output for s in runs[0].served] == [one.num_output for one in items]
    if settings:
        assert runs[0].report()["num_preemptions"] > 0


def test_a_tight_pool_with_a_host_tier_swaps_instead_of_recomputing():
    items = drawn_items(60, 300.0)
    one = config(num_blocks=12, host_cache_bytes=2**20, preempt="swap")
    run = simulate(items, MODEL, one, AffineCost(0.004, 1e-5))
    assert run.report()["num_preemptions"] > 0
    assert [s.num_output for s in run.served] == [one.num_output for one in items]


def test_an_engine_without_a_size_of_its_pool_is_refused():
    with pytest.raises(ConfigError, match="num_blocks"):
        simulate([item(0, 0.0, 5, 3)], MODEL, config(num_blocks=None), AffineCost(0.01, 0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"level": "afine"}, "cost.level is 'afine', must be one of"),
        ({"level": "affine", "step_s": 0.1}, "cost has no 'token_s'"),
        ({"level": "affine", "step_s": -1, "token_s": 0}, "step_s is -1, must be"),
        ({"level": "affine", "step_s": 1, "token_s": 0, "tokens": 3}, "cost has 'tokens'"),
        ({"level": "affine", "step_s": 1, "token_s": 0, "host": {"row": 3}}, "cost: host has 'row', must be of step_s"),
        ("/nowhere/cost.json", "No such file"),
    ],
)
def test_a_cost_that_cannot_be_is_refused_with_the_field(given, words):
    with pytest.raises(ConfigError, match=words):
        read_cost(given)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 12},
        {"enable_prefix_caching": True, "num_blocks": 12, "shared_prefix_attention": True},
        {"kv_eviction": {"method": "h2o", "budget": 0.3}},
    ],
)
def test_steps_without_arrays_have_the_sizes_of_those_with_them(monkeypatch, settings):
    build, compared = SizeBuilder.build, []

    def both(self, batch, rows):
        found, ends = build(self, batch, rows)
        assert isinstance(found, SizedStep)
        made, _ = BatchBuilder.build(self, batch, rows)
        sizes = [(s.shape, s.num_sampled, s.num_attended) for s in (found, made)]
        assert sizes[0] == sizes[1] and len(found.tokens) == len(batch.sampled)
        compared.append(np.count_nonzero(made.arrays.positions >= 0) == found.size.num_tokens)
        return found, ends

    monkeypatch.setattr(SizeBuilder, "build", both)
    items = drawn_items(60, 300.0, texts=3)
    run = simulate(items, MODEL, config(**settings), AffineCost(0.004, 1e-5))
    assert len(compared) >= len(run.records) and all(compared)
    assert [r.num_attended for r in run.records] != [0] * len(run.records)


def chats(count=8, turns=3, think_s=0.3):
    """Sessions with growing prompts; the pool and the host hold a few of them."""
    items = []
    for session in range(count):
        after = None
        for turn in range(turns):
            at = session * 0.05 if after is None else math.nan
            text = {"seed": session, "after": after, "think_s": think_s, "session": session}
            items.append(item(len(items), at, 30 * (turn + 1), 3, **text))
            after = items[-1].index
    return items


TIERS = {"enable_prefix_caching": True, "num_blocks": 14, "host_cache_bytes": 2**22, "max_num_seqs": 2}


def test_prefixes_that_the_disk_keeps_are_hits_and_take_its_time():
    fast = MoveCost(read=TransferLink(0.0005), written=TransferLink(0.001))
    slow = MoveCost(read=TransferLink(0.05), written=TransferLink(0.001))
    runs = {}
    for name, move, disk in (("none", fast, None), ("fast", fast, "a folder"), ("slow", slow, "a folder")):
        chosen, cost = config(**TIERS, disk_cache_dir=disk), AffineCost(0.004, 1e-3, move=move)
        runs[name] = simulate(chats(), MODEL, chosen, cost)
        assert simulate(chats(), MODEL, chosen, cost).text() == runs[name].text()
    hits = {name: run.report()["hit_rate"] for name, run in runs.items()}
    assert hits["fast"] > 1.2 * hits["none"] and runs["none"].disk_s == 0
    assert runs["slow"].disk_s > runs["fast"].disk_s > 0
    assert runs["slow"].report()["ttft_s"]["mean"] > runs["fast"].report()["ttft_s"]["mean"] + 0.02
    assert all(served.finish_reason == "stop" for run in runs.values() for served in run.served)


def test_a_request_that_waits_for_the_disk_alone_waits_for_its_reads():
    read_s, blocks = 0.010, []
    for move in (MoveCost(), MoveCost(read=TransferLink(read_s))):
        items = [item(0, 0.0, 80, 2, seed=0), *(item(n, 1.0 + n / 10, 80, 2) for n in range(1, 9))]
        items.append(item(9, 5.0, 80, 2, seed=0))
        chosen = config(**TIERS, disk_cache_dir="a folder", async_scheduling=False)
        run = simulate(items, MODEL, chosen, AffineCost(0.004, 0.0, move=move))
        last = run.served[-1]
        assert last.num_cached_tokens == 64
        blocks.append(last.first_token_s - last.arrival_s)
    assert blocks[1] - blocks[0] == pytest.approx(4 * read_s)


def test_the_simulated_disk_keeps_what_the_real_one_keeps(tmp_path):
    format, rng = BlockFormat("model", (Leaf("kv", (64,), "uint8"),)), np.random.default_rng(0)
    clock, data = VirtualClock(), np.zeros(64, np.uint8)
    budget = 12 * file_bytes(format, BlockFacts(bytes(32), bytes(32), bytes(16), 0)) + 10
    real, simulated = (
        DiskTier(tmp_path, format, budget),
        SimDisk(format, budget, clock, MoveCost(read=TransferLink(0.1))),
    )
    for _ in range(300):
        chain, depth = (int(n) for n in rng.integers(0, 6, 2))
        key, parent = (bytes([chain, d]) + bytes(30) for d in (depth, depth - 1 if depth else 255))
        facts = BlockFacts(key, parent, bytes(16), depth)
        if rng.random() < 0.5:
            expected = facts if rng.random() < 0.9 else BlockFacts(key, parent, b"other tokens" + bytes(4), depth)
            found = simulated.read(key, expected, data)
            simulated.wait([found], 1.0)
            assert found.done() and found.result() == real.read(key, expected, data).result()
        else:
            for disk in (real, simulated):
                disk.write(facts, data)
        for disk in (real, simulated):
            disk.flush()
        assert sorted(real.keys()) == sorted(simulated.keys()) and real.num_bytes == simulated.num_bytes
    assert real.counters == simulated.counters and real.counters.replaced > 20 < real.counters.read
    real.close()
