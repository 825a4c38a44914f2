"""`ksana bench throughput`: what is measured of engines and peers that are fakes."""

import dataclasses

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.layer_spec import ExpertsSpec
from ksana_jax.lab.bench import bounds, throughput
from ksana_jax.lab.bench.bounds import Rates, WorkBound, work_of
from ksana_jax.lab.bench.throughput import BOUND, EVICTING, OURS, STEPS, Throughput
from ksana_jax.lab.runs.tasks.results import ResultRow
from ksana_jax.models.operators import Operators
from ksana_jax.ops.linear import LinearImplementation
from ksana_jax.ops.native_operators import PackedMatrix
from tests.benches.fakes import MODEL, FakeLLM, rows_of


def test_evictions_are_compared_in_a_pool_of_as_many_bytes(engines):
    setting = {"method": "h2o", "budget": 0.2}
    rows, made = rows_of(Throughput(num_blocks=10, kv_eviction=setting, requests=(2,)))
    assert [s.get("num_blocks") for s in engines] == [10, 10, None]
    assert engines[2]["memory_bytes"] == 10_000 and engines[2]["kv_eviction"] == setting
    assert rows[OURS, 2].mean("running") == 1.5 and rows[EVICTING, 2].mean("running") == 6.0
    assert "evicting gives 2.00 times the output tokens/s" in made.conclusion
    with pytest.raises(ConfigError, match="kv_eviction method is 'h20'"):
        Throughput(kv_eviction={"method": "h20"}).cases()


def test_steps_that_share_a_call_have_a_row_of_their_own(engines):
    rows, made = rows_of(Throughput(num_blocks=10, requests=(2,), num_scheduler_steps=4))
    assert [s.get("num_scheduler_steps") for s in engines] == [None, 4]
    assert (rows[OURS, 2].mean("run_s"), rows[STEPS, 2].mean("run_s")) == (2.0, 1.6)
    assert rows[STEPS, 2].mean("same_tokens") == 2
    assert "Steps together: num_scheduler_steps=4, decode steps in one call." in made.notes
    engines.clear()
    rows, _ = rows_of(Throughput(num_blocks=10, requests=(2,), num_scheduler_steps=1))
    assert len(engines) == 1 and (STEPS, 2) not in rows
    with pytest.raises(ConfigError, match="num_scheduler_steps is 0, must be"):
        Throughput(num_scheduler_steps=0).cases()


def test_every_engine_is_told_its_share_of_the_bound(engines):
    rows, _ = rows_of(Throughput(num_blocks=10, requests=(2, 1)), repeats=2)  # the second one backwards
    assert rows[OURS, 2].mean("of_bound") == 0.25 and rows[OURS, 1].mean("of_bound") == 0.125
    assert rows[BOUND, 2].mean("of_bound") is None
    assert rows[OURS, 1].mean("output_tokens_per_s") == 64.0  # 128 tokens of one request in 2 s


def test_a_model_with_experts_has_no_bound_that_counts_all_of_them(engines, monkeypatch):
    experts = dataclasses.replace(MODEL, mlp="swiglu_experts", experts=ExpertsSpec(4, 2))
    monkeypatch.setattr(
        FakeLLM,
        "__init__",
        lambda self, num_blocks, steps: vars(self).update(
            num_blocks=num_blocks, block_bytes=1000, model_config=experts, steps=steps
        ),
    )
    rows, made = rows_of(Throughput(num_blocks=10, requests=(2,), num_scheduler_steps=1))
    assert rows[OURS, 2].mean("run_s") == 2.0 and rows[OURS, 2].mean("of_bound") is None
    assert rows[BOUND, 2].mean("run_s") is None
    assert any("bound: absent, a step reads only the experts that its tokens choose" in note for note in made.notes)


def test_numbers_of_tokens_may_be_given(engines, monkeypatch):
    asked = []

    def run(llm, prompts, lengths):
        asked.append(([len(p) for p in prompts], lengths))
        return 1.0, [[1]] * len(prompts), {"steps": 1, "num_blocks": 10, "running": None}

    monkeypatch.setattr(throughput, "run", run)
    rows_of(Throughput(requests=(1, 2), num_scheduler_steps=1, prompt_tokens=600, output_tokens=1))
    assert asked[-2:] == [([600], [1]), ([600, 600], [1, 1])]
    assert [settings["max_model_len"] for settings in engines] == [601]
    with pytest.raises(ConfigError, match="prompt_tokens is 0, must be"):
        Throughput(prompt_tokens=0).cases()


def test_the_bound_counts_every_weight_key_and_product_once():
    # One request of three prompt tokens and two of output: the prompt, then one step that reads four keys.
    work = work_of(MODEL, "bf16", [3], [2])
    body, head = 2 * (2 * (2 * 64 + 2 * 32 + 3 * 128 + 2 * 8) + 8), 2 * 800
    weight_bytes = (body + head) // 2 * 2
    kv_token = 2 * 2 * 1 * 4 * 2
    assert work.num_bytes == 2 * weight_bytes + 4 * kv_token
    assert work_of(MODEL, "bf16", [3], [2], weights_bytes=7).num_bytes == 2 * 7 + 4 * kv_token
    assert work.flop == 4 * body + 2 * head + (1 + 2 + 3 + 4) * 4 * 2 * 2 * 4
    assert WorkBound(6.0, 8.0).seconds(Rates(2.0, 4.0)) == 3.0


def test_the_notes_have_the_rates_of_the_bound():
    m = {"metric": "repetition", "turn": 0, "compilations": 0, "load": 0.0, "seconds": 1.0}
    row = ResultRow(BOUND, {"requests": 2}, 1, [[m | {"bytes_per_s": 2e9, "flop_per_s": 3e9}]], {})
    assert "at 2.0 GB/s" in Throughput().notes([row])[0] and "at 3 GFLOP/s" in Throughput().notes([row])[0]


def test_the_bound_multiplies_weights_as_each_implementation_takes_them(monkeypatch):
    given = []

    def note(x, w):
        given.append(type(w))
        return x

    fakes = [LinearImplementation("", lambda: Operators(note), lambda *_: None, packs) for packs in (True, False)]
    monkeypatch.setattr("ksana_jax.ops.linear.LINEAR_IMPLEMENTATIONS", fakes)
    found = bounds.measure_rates("f32", 2**20)
    assert found.flop_per_s > 0 and found.bytes_per_s > 0
    assert given[0] is PackedMatrix and given[-1] is not PackedMatrix
