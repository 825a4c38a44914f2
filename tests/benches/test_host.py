"""What is timed, with few rows and steps; no model."""

import json

import pytest

from experiments.benches import host, host_engine
from experiments.benches.host import EVICTING, OURS, VLLM, Host
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench import command, core
from ksana_jax.lab.bench.core import Unavailable


def test_results_are_json_in_the_last_line(capsys):
    command.run_and_show(Host(rows=(3, 8), steps=5, context=40), repeats=1, out=None, as_json=True)
    results = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["results"]
    assert [r["rows"] for r in results] == [3, 8]
    for r in results:
        parts = r["schedule_us"] + r["build_us"] + r["advance_us"] + r["settle_us"]
        assert 0 < r["step_us"] < 1e5 and 0 < parts < 1e5 and 0 < r["add_us"] < 1e5 and 0 < r["admit_us"] < 1e5


def test_steps_that_evict_and_steps_with_a_prefix_cache_are_rows_beside_the_others():
    bench = Host(rows=(4,), steps=5, context=40, prefix_cache="both", kv_eviction={"method": "h2o", "budget": 24})
    made = command.report_of(bench, core.run(bench, 1)[0])
    assert [(row.label, row.point["prefix_cache"]) for row in made.rows] == [
        (OURS, "off"),
        (EVICTING, "off"),
        (OURS, "on"),
    ]
    assert all(row.mean("step_us") for row in made.rows)
    assert "Prefix cache off: ksana_jax, evicting takes " in made.conclusion


def test_engines_of_as_many_rows_take_turns_step_by_step(monkeypatch):
    steps = []

    class Timed:
        def __init__(self, engine):
            self.engine = engine

        def step(self):
            steps.append(self.engine)

        step_parts = step

        def watch_parts(self):
            steps.append("parts")

        def medians(self):
            return {"step_us": 1.0}

    monkeypatch.setattr(host, "TimedEngine", Timed)
    monkeypatch.setattr(host, "decoding_engine", lambda rows, context, most, cached, eviction: (rows, cached))
    monkeypatch.setattr(host, "admission", lambda *_: {})
    monkeypatch.setattr(host, "WARM_UP", 1)
    bench = Host(rows=(2, 3), steps=1, prefix_cache="both")
    assert [case.point["rows"] for case, _ in bench.turn(bench.cases())] == [2, 2, 3, 3]
    assert steps[:6] == [(2, False), (2, True), (2, False), (2, True), "parts", "parts"]


def test_the_time_to_admit_is_per_request(monkeypatch):
    clock = iter(range(10_000_000))
    monkeypatch.setattr(host_engine.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(host_engine, "PREFILL_TOKENS", 16 * 64)
    found = host_engine.admission(64, prefix_cache=False)
    assert found["add_us"] == 1e6  # each reading of the clock is a second later
    assert found["admit_us"] == 1e6 / 16


def test_the_scheduler_of_vllm_is_asked_for_the_same_steps(monkeypatch):
    asked = []

    class Peer:
        versions, pid = "vLLM 1", 0

        def __init__(self, spec, environment, model):
            if str(environment) == "none":
                raise Unavailable("absent: make it")

        def ask(self, call, **arguments):
            asked.append((call, arguments))
            return {"step_us": 300.0, "add_us": 200.0}

        def close(self):
            pass

    monkeypatch.setattr(host, "PeerProcess", Peer)
    bench = Host(rows=(2,), steps=3, context=20, peers="there")
    made = command.report_of(bench, core.run(bench, 1)[0])
    assert asked == [("measure", {"rows": 2, "prefix_cache": False, "steps": 3, "context": 20})]
    assert made.rows[1].label == VLLM and made.rows[1].mean("step_us") == 300.0
    assert any(note.startswith("vLLM 1: ") for note in made.notes)
    bench = Host(rows=(2,), steps=3, context=20, peers="none")
    made = command.report_of(bench, core.run(bench, 1)[0])
    assert made.rows[0].mean("step_us") and any("absent: make it" in note for note in made.notes)


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"rows is 0, must be an integer from 1"):
        Host(rows=(0,)).cases()
    with pytest.raises(ConfigError, match="kv_eviction method is 'h20'"):
        Host(kv_eviction={"method": "h20"}).cases()
    with pytest.raises(ConfigError, match="prefix_cache is 'maybe'"):
        Host(prefix_cache="maybe").cases()
