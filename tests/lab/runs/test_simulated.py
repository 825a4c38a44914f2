"""Tasks that simulate: rows, figures and named failures, without a model's weights."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import runs

from experiments.benches.scheduling import PADDED, SimulatedRequest, serve
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.tasks.simulated import SimulatedSettings, Simulation
from ksana_jax.lab.simulator import request_level
from ksana_jax.lab.simulator.answers import PlannedAnswer
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import AffineCost
from ksana_jax.lab.simulator.fitted import PHASES, FittedCost, ShapeTimes
from ksana_jax.lab.simulator.one_engine import SimEngine
from ksana_jax.scheduler.step.ladders import all_shapes, make_buckets
from ksana_jax.serve.workload import read_workload

ENGINE = {"block_size": 16, "num_blocks": 512, "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 512}
WORKLOAD = {"kind": "synthetic", "num_requests": 60, "rate": 2.0, "prompt": [20, 200], "output": [1, 40]}
COST = {"level": "affine", "step_s": 0.02, "token_s": 0.0002}


def given(task, **fields):
    settings = {"workload": WORKLOAD, "cost": COST, **fields.pop("settings", {})}
    engine = ENGINE | fields.pop("engine", {})
    fixed = {"model": "llama-2-7b", "load_format": "dummy", "engine": engine, "settings": settings}
    return {"task": task, **fixed, **fields}


def no_engine(*args, **settings):
    raise AssertionError("a simulation loads no model")


def report(tmp_path, experiment):
    return runs.reported(plan(experiment), tmp_path / "run", make_llm=no_engine)


def test_one_server_is_slower_at_a_higher_rate(tmp_path):
    made = report(tmp_path, given("simulate", grid={"settings.rate": [0.5, 20.0]}))
    slow, fast = (row.mean("ttft_p50_s") for row in made.rows)
    assert slow is not None and fast is not None and 0.02 < slow < fast
    assert (tmp_path / "run/figure.png").exists()


def test_a_queue_that_grows_is_named_in_the_notes(tmp_path):
    made = report(tmp_path, given("simulate", settings={"rate": 200.0, "warm_up": 0}))
    assert any("the queue grows" in note for note in made.notes)


def test_a_run_whose_requests_were_all_refused_says_so_and_has_no_times(tmp_path):
    workload = WORKLOAD | {"prompt": [2000, 3000]}
    made = report(tmp_path, given("simulate", settings={"workload": workload}))
    [row] = made.rows
    assert row.mean("ttft_p50_s") is None and any("refused" in note for note in made.notes)


def test_equal_trials_measure_equal_numbers(tmp_path):
    first, second = (
        runs.reported(plan(given("route", settings={"servers": 2}, seeds=[0, 1])), tmp_path / name, make_llm=no_engine)
        for name in ("a", "b")
    )
    assert [row.values for row in first.rows] == [row.values for row in second.rows]
    [row] = first.rows
    assert row.values["ttft_p50_s"][0] != row.values["ttft_p50_s"][1]
    assert row.samples["ttft_p50_s"] == ["synthetic, seed 0", "synthetic, seed 1"]


def test_noise_is_drawn_for_each_server_from_the_trials_seed(tmp_path):
    config = EngineConfig(**ENGINE)  # pyright: ignore[reportArgumentType]
    shapes = [ShapeTimes(shape, 5, 0.01, 1.0, (0.5, 1.5)) for shape in all_shapes(make_buckets(config, "cpu"))]
    cost = FittedCost(phases={phase: {"step": 0.01} for phase in PHASES}, shapes=shapes).plain()

    def measured(seed, **settings):
        config = {"model": "llama-2-7b", "engine": ENGINE | {"kv_cache_dtype": "auto"}, "pattern": None}
        config["layer_patterns"] = None
        fields = {"workload": WORKLOAD, "cost": cost, "servers": 2, "policy": "round_robin", **settings}
        return Simulation(config, SimulatedSettings(**fields), seed).measure()

    first, same, plain = measured(0, noise=True), measured(0, noise=True), measured(0)
    assert first == same and first["e2e_mean_s"] != plain["e2e_mean_s"]
    assert first["e2e_mean_s"] == pytest.approx(plain["e2e_mean_s"], rel=0.1)
    # Two servers that serve equal requests take different times.
    twice = WORKLOAD | {"num_requests": 2, "rate": None, "prompt": 100, "output": 40}
    both = measured(0, noise=True, workload=twice, warm_up=0)
    assert both["e2e_max_s"] > 1.01 * both["e2e_mean_s"]
    with pytest.raises(ConfigError, match=r"settings.noise is set, server is 'engine' and cost AffineCost"):
        plan(given("route", settings={"noise": True}))


def test_policies_are_compared_with_least_work_on_the_same_requests(tmp_path):
    sessions = {"kind": "sessions", "num_requests": 150, "rate": 15.0, "think_s": 0.5, "system": 400, "num_systems": 6}
    sessions |= {"user": 32, "output": 16, "max_prompt": 900}
    experiment = given(
        "route",
        engine={"enable_prefix_caching": True},
        settings={"workload": sessions, "servers": 3},
        variants=[{"name": f"sessions, {policy}", "settings.policy": policy} for policy in ("least_work", "min_ttft")],
    )
    made = report(tmp_path, experiment)
    hits = {row.label: row.mean("hit_rate") or 0.0 for row in made.rows}
    assert hits["sessions, min_ttft"] > hits["sessions, least_work"]
    assert (tmp_path / "run/figure.png").exists()


def test_capacities_are_in_the_table_and_the_curve_in_the_records(tmp_path):
    settings = {"slo": {"fast": "ttft_p50=0.1", "slow": "ttft_p50=1", "never": {"ttft": 0.001}}, "ratio": 1.3}
    experiment = given("capacity", settings=settings, variants=[
        {"name": "engine"}, {"name": "by request", "settings.server": "request_level"}
    ])  # fmt: skip
    made = report(tmp_path, experiment)
    ours, theirs = made.rows
    fast, slow, by_request = ours.mean("rate, fast"), ours.mean("rate, slow"), theirs.mean("rate, slow")
    assert fast is not None and slow is not None and by_request is not None
    assert 0 < fast <= slow and by_request < slow
    assert ours.mean("rate, never") == 0
    assert any("No rate keeps the objectives: engine, never: " in note and "attainment" in note for note in made.notes)
    rates = [m["rate"] for m in ours.trials[0] if m["metric"] == "probe"]
    assert len(rates) > 5 and rates == sorted(rates)


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("simulate", {"rate": 0}, "settings.rate is 0"),
        ("simulate", {"servers": 2}, "task 'simulate' has one server"),
        ("simulate", {"warm_up": 1.0}, "settings.warm_up is 1.0"),
        ("simulate", {"cost": {"level": "afine"}}, "cost.level is 'afine'"),
        ("simulate", {"workload": "ocra"}, "ocra"),
        ("route", {"policy": "least_wrk"}, "the nearest of .* is 'least_work'"),
        ("route", {"router": {"ttl": 3}}, "settings.router has 'ttl'"),
        ("route", {"server": "request_level"}, "simulated for one server"),
        ("capacity", {}, "settings.slo is empty"),
        ("capacity", {"slo": {"a": "tft=1"}}, "the nearest is 'ttft'"),
        ("capacity", {"slo": {"a": "ttft=1"}, "rate": 2.0}, "set first_rate"),
        ("capacity", {"slo": {"a": "ttft=1"}, "curve": "ttft"}, "must name a percentile"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(task, settings, words):
    with pytest.raises(ConfigError, match=words):
        plan(given(task, settings=settings))


def test_a_pool_of_unknown_size_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.num_blocks is None and settings\.pool_bytes None"):
        plan(given("simulate", engine={"num_blocks": None}))
    with pytest.raises(ConfigError, match=r"engine\.num_blocks is 512 and settings\.pool_bytes 100"):
        plan(given("simulate", settings={"pool_bytes": 100}))
    with pytest.raises(ConfigError, match=r"pool_bytes is 100, a block has 16,777,216 bytes"):
        plan(given("simulate", engine={"num_blocks": None}, settings={"pool_bytes": 100}))


def simulation(engine, **settings):
    config = {"model": "llama-2-7b", "engine": ENGINE | engine, "pattern": None, "layer_patterns": None}
    return Simulation(config, SimulatedSettings(workload=WORKLOAD, **settings), 0)


def test_a_quantised_pool_of_equal_bytes_has_more_blocks_and_is_read_faster():
    pool = {"pool_bytes": 2**33, "cost": {"level": "roofline", "model": "llama-2-7b", "chip": "h200"}}
    plain, int8 = (
        simulation({"dtype": "bf16", "num_blocks": None, "kv_cache_dtype": kind}, **pool) for kind in ("auto", "int8")
    )
    assert plain.engine.num_blocks == 2**33 // (2 * 32 * 4096 * 2 * 16) == 1024
    assert 1.8 * 1024 < (int8.engine.num_blocks or 0) <= 2 * 1024
    assert plain.measure()["tpot_p50_s"] > int8.measure()["tpot_p50_s"] > 0.9 * plain.measure()["tpot_p50_s"]


def test_a_fit_that_changes_makes_another_trial(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text('{"level": "affine", "step_s": 0.01, "token_s": 0.001}')
    [first] = plan(given("simulate", settings={"cost": str(path)})).trials
    path.write_text('{"level": "affine", "step_s": 0.02, "token_s": 0.001}')
    [second] = plan(given("simulate", settings={"cost": str(path)})).trials
    assert first.id != second.id


def test_other_costs_make_another_trial():
    ids = {plan(given("simulate", settings={"cost": COST | {"step_s": s}})).trials[0].id for s in (0.01, 0.02, 0.03)}
    assert len(ids) == 3


def test_batching_by_request_pads_and_waits():
    items = read_workload({"kind": "synthetic", "num_requests": 3, "rate": None, "prompt": 10, "output": 4}).make(1000)
    lengths = [(10, 4), (30, 2), (5, 6)]
    changed = [
        dataclasses.replace(item, num_prompt=p, num_output=o) for item, (p, o) in zip(items.items, lengths, strict=True)
    ]
    first, second, third = request_level.serve(changed, AffineCost(1.0, 0.01), 2)
    # Two prompts of 30 tokens, then three steps of two rows; the third is alone.
    assert first.finished_s == second.finished_s == pytest.approx(1.6 + 3 * 1.02)
    assert third.finished_s == pytest.approx(first.finished_s + 1.05 + 5 * 1.01)


class Told:
    """An engine whose simulation is told how long the answers of its requests are."""

    def __init__(self, sim):
        self.sim, self.step = sim, sim.engine.step

    def add_request(self, prompt, params):
        request = self.sim.engine.add_request(prompt, params)
        self.sim.answers.expect(request.request_id, PlannedAnswer(np.zeros(params.max_tokens, np.int32)))
        return request


def test_batching_by_request_takes_the_time_that_the_engine_takes_with_padded_requests():
    # The benchmark does the same in real time: here both have the simulated one.
    cost, clock = AffineCost(0.5, 0.01, 1e-6), VirtualClock()
    items = read_workload(WORKLOAD | {"num_requests": 20, "rate": 0.3}).make(1000).items
    engine: dict[str, Any] = ENGINE | {"max_num_seqs": 4, "max_num_batched_tokens": 1024, "async_scheduling": False}
    config = EngineConfig(**engine)
    sim = SimEngine(ModelConfig(vocab_size=1000, eos_ids=(2,)), config, clock, cost)
    jobs = [SimulatedRequest(item.tokens(), item.num_output, item.arrival_s) for item in items]
    ended = serve(Told(sim), jobs, PADDED, 4, sim.clock)  # pyright: ignore[reportArgumentType]
    found = request_level.serve(items, cost, 4)
    assert [r.finished_s for r in found] == pytest.approx(ended)
