"""Costs that are fitted to recorded steps, replayed, and read from files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab import recording
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import AffineCost, Cost, HostCost, read_cost
from ksana_jax.lab.simulator.fit import fit
from ksana_jax.lab.simulator.move_cost import WAYS, MoveCost, TransferLink
from ksana_jax.lab.simulator.one_engine import SimEngine
from ksana_jax.lab.simulator.replay import ReplayCost
from ksana_jax.lab.simulator.run import simulate
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.loading.config_json import load_config
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from tests.lab.simulator.items import MODEL, config, drawn_items

# 2 ms a step, and more for tokens and what they see; a host of 0.1 ms.
TRUE = AffineCost(0.002, 1e-4, 1e-6, 2e-5, host=HostCost(1e-4, 1e-5))


class ByShape(Cost):
    """Steps whose time depends on their padded sizes alone."""

    def seconds(self, size):
        return 0.002 + 1e-4 * size.shape.num_tokens


def recorded(count=280, rate=40.0, seed=0, cost=TRUE, **settings):
    return simulate(drawn_items(count, rate, seed), MODEL, config(async_scheduling=False, **settings), cost).records


def test_a_fit_finds_the_costs_that_steps_had():
    cost = fit(recorded())
    errors = cost.provenance["held_out"]
    assert set(errors) == {"decode", "chunk"} and all(found["mape"] < 1e-3 for found in errors.values())
    assert cost.host.step_s == pytest.approx(1e-4, rel=1e-3) and cost.host.row_s == pytest.approx(1e-5, rel=1e-3)
    assert cost.provenance["moves"].startswith("not measured")


@pytest.mark.parametrize(("method", "true"), [("affine", TRUE), ("table", ByShape(host=HostCost(1e-4)))])
def test_costs_fitted_on_one_workload_predict_another(method, true):
    cost = fit(recorded(cost=true), method=method)
    items = drawn_items(100, 60.0, seed=5)
    runs = [simulate(items, MODEL, config(), c).report() for c in (true, cost)]
    for name in ("e2e_s", "ttft_s", "tpot_s"):
        assert runs[1][name]["p50"] == pytest.approx(runs[0][name]["p50"], rel=0.005)


def test_costs_of_moved_blocks_are_found():
    true = MoveCost(saved=TransferLink(2e-5, 1e9), loaded=TransferLink(0.0, 4e9), read=TransferLink(1e-4))
    moves = [
        {"way": way, "num_bytes": size, "seconds": getattr(true, way).seconds(size)}
        for way in ("saved", "loaded", "read")
        for size in (4096, 32768, 2**20)
    ]
    cost = fit(recorded(), {"moves": moves})
    for way in WAYS:
        found, expected = getattr(cost.move, way), getattr(true, way)
        assert found.fixed_s == pytest.approx(expected.fixed_s, rel=1e-6, abs=1e-12)
        assert [found.seconds(n) for n in (100, 10**6)] == pytest.approx([expected.seconds(n) for n in (100, 10**6)])
    assert cost.provenance["moves"] == "measured: 9"


def test_moves_take_their_time_by_bytes_and_a_fixed_part():
    tight = config(num_blocks=12, host_cache_bytes=2**24, preempt="swap", async_scheduling=False)
    cost = AffineCost(0.004, 1e-5, move=MoveCost(saved=SLOW, loaded=SLOW))
    run = simulate(drawn_items(60, 300.0), MODEL, tight, cost)
    block_bytes = SimEngine(MODEL, tight, VirtualClock(), cost).engine.scheduler.layout.block_bytes
    moves = [n for record in run.records for n in (record.num_saved, record.num_loaded) if n]
    computing_s = sum(0.004 + 1e-5 * record.num_tokens for record in run.records)
    assert len(moves) > 5 and max(moves) > 1
    assert run.busy_s == pytest.approx(computing_s + sum(0.001 + n * block_bytes / 1e9 for n in moves))


SLOW = TransferLink(0.001, 1e9)


@pytest.mark.parametrize(
    ("move", "words"),
    [
        ({"stored": {}}, "move has 'stored', must be of saved, copied, loaded, written, read"),
        ({"saved": 3}, "move.saved is 3, must be a mapping of fixed_s, bytes_per_s"),
        ({"saved": {"bytes_per_s": 0}}, "move.saved: bytes_per_s is 0, must be"),
        ({"read": {"fixed_s": -1}}, "move.read: fixed_s is -1, must be"),
    ],
)
def test_bad_costs_of_moves_are_refused(move, words):
    with pytest.raises(ConfigError, match=words):
        read_cost({"level": "affine", "step_s": 0.1, "token_s": 0, "move": move})


def test_a_file_of_steps_and_one_of_costs_give_the_same_costs_again(tmp_path):
    records = recorded()
    recording.write(tmp_path / "steps.jsonl", {"model": "toy"}, map(recording.plain_record, records))
    made = recording.read(tmp_path / "steps.jsonl")
    assert made.records() == records and made.header["model"] == "toy"
    cost = fit(made.records(), made.header)
    (tmp_path / "cost.json").write_text(json.dumps(cost.plain()))
    again = read_cost(tmp_path / "cost.json")
    assert json.dumps(again.plain()) == json.dumps(cost.plain())  # pyright: ignore[reportAttributeAccessIssue]
    runs = [simulate(drawn_items(50, 40.0), MODEL, config(), c, seed=1).text() for c in (cost, again)]
    assert runs[0] == runs[1]


def test_too_few_steps_are_an_error_with_the_numbers():
    with pytest.raises(ConfigError, match=r"\d+ chunk steps of \d+ can be used, 200 are needed"):
        fit(recorded(20))


def test_steps_that_share_a_call_have_no_times_of_their_own():
    with pytest.raises(ConfigError, match="num_scheduler_steps is above 1"):
        fit(recorded(), {"config": {"num_scheduler_steps": 4}})


def test_steps_that_compile_are_left_out():
    records = recorded()
    compiled = [r._replace(compiled=True, ended_s=r.ended_s + 5.0) if i == 70 else r for i, r in enumerate(records)]
    later = [r._replace(began_s=r.began_s + 5, ended_s=r.ended_s + 5) for r in compiled[71:]]
    assert fit([*compiled[:71], *later]).provenance["held_out"]["decode"]["mape"] < 1e-3


def test_shapes_that_were_not_measured_are_refused_above_a_share_of_the_time():
    cost = fit(recorded(max_model_len=128))
    with pytest.raises(ConfigError, match=r"% of the time are steps of \d+ shapes that were not measured"):
        simulate(drawn_items(50, 60.0), MODEL, config(max_num_seqs=32, num_blocks=400), cost)


def test_noise_has_the_spread_of_the_measured_steps_and_follows_its_seed():
    rng = np.random.default_rng(0)
    records, shift = [], 0.0
    for r in recorded(400):
        more = 0.002 * rng.random()
        records.append(r._replace(began_s=r.began_s + shift, ended_s=r.ended_s + shift + more))
        shift += more
    cost = fit(records)
    items = drawn_items(100, 30.0, 3)
    plain, one, same, other = (simulate(items, MODEL, config(), cost, seed=s).report() for s in (None, 1, 1, 2))
    assert one == same != other
    assert one["e2e_s"]["mean"] == pytest.approx(plain["e2e_s"]["mean"], rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 12}, {"num_blocks": 12, "host_cache_bytes": 2**20, "preempt": "swap"}],
    ids=["plenty", "tight", "host tier"],
)
@pytest.mark.parametrize("texts", [None, 5, 40], ids=["own texts", "5 texts", "40 texts"])
@pytest.mark.parametrize("ahead", [False, True])
def test_replayed_times_give_the_recorded_decisions(settings, texts, ahead):
    items = drawn_items(80, 120.0, texts=texts)
    chosen = config(async_scheduling=ahead, enable_prefix_caching=texts is not None, **settings)
    rng = np.random.default_rng(1)
    noisy = ReplayCost(device_s=(0.002 + 0.004 * rng.random(4000)).tolist(), host_s=(1e-3 * rng.random(4000)).tolist())
    first = simulate(items, MODEL, chosen, noisy)
    again = simulate(items, MODEL, chosen, ReplayCost.of(first.records))
    assert [r.without_times() for r in again.records] == [r.without_times() for r in first.records]
    np.testing.assert_allclose([s.finished_s for s in again.served], [s.finished_s for s in first.served], rtol=1e-9)


def test_a_replay_that_needs_more_steps_than_were_recorded_says_so():
    with pytest.raises(ConfigError, match="the recording has 3 steps, more are computed"):
        simulate(drawn_items(5, 10.0), MODEL, config(), ReplayCost(device_s=[0.1] * 3, host_s=[0.0] * 3))


PEAK = {"memory_efficiency": 1.0, "compute_efficiency": 1.0}
ROOFLINE = {"level": "roofline", "model": "bench-s", "chip": "h200", **PEAK}
# Parameters in products of a layer of bench-s: q and o, k and v, gate, up and down.
OF_LAYER = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408


def test_a_decode_on_a_machine_that_is_not_there_reads_all_weights():
    cost = read_cost(ROOFLINE)
    size = StepSize(StepShape((TileGroup(1, 1),), 4, 1), 1, 1, 0, 1, 1)
    weights = 2 * (8 * OF_LAYER + 8192 * 512)  # bytes in bf16, the head included
    assert cost.seconds(size) == pytest.approx(weights / 4.8e12, rel=0.01)
    assert cost.provenance["measured"] is False and cost.provenance["label"].startswith("not measured")


def test_a_long_prompt_on_a_machine_that_is_not_there_takes_its_operations():
    cost = read_cost(ROOFLINE)
    size = StepSize(StepShape((TileGroup(64, 32),), 4, 1), 1, 2048, 2048, 2048 * 2049 // 2, 1)
    flops = 2 * 8 * OF_LAYER * 2048 + 4 * 8 * 512 * size.num_attended + 2 * 8192 * 512
    assert cost.seconds(size) == pytest.approx(flops / 989.5e12, rel=0.01)


def test_a_simulated_engine_reads_a_latent_once_for_all_heads():
    folder = Path(__file__).parents[2] / "golden" / "deepseek_v3-latent-experts-tied"
    model = dataclasses.replace(load_config(folder), eos_ids=(2,))
    cost: Any = read_cost({"level": "roofline", "model": str(folder), "chip": "h200"})
    assert cost.kv_token_bytes == model.num_layers * (24 + 8) * 2
    assert len(simulate(drawn_items(40, 120.0), model, config(), cost).served) == 40


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chip": "h300"}, "cost.chip is 'h300', must be one of h200"),
        ({"memory_efficiency": 1.5}, "cost.memory_efficiency is 1.5"),
        ({"chip": "v5e", "dtype": "f16"}, "published rates for bf16, f32"),
        ({"speed": 3}, "cost has 'speed'"),
    ],
)
def test_a_roofline_that_cannot_be_drawn_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        read_cost(ROOFLINE | fields)
