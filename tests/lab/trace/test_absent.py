"""Bounds of steps follow from shapes; an absent machine, or an absent compiler, is one clear line."""

import dataclasses
import json

import pytest

from ksana_jax import AttentionPattern, ModelConfig, cli
from ksana_jax.core.config import ConfigError
from ksana_jax.core.layer_spec import ExpertsSpec
from ksana_jax.devkit.compile_check import targets
from ksana_jax.lab.experiments.config import load
from ksana_jax.lab.trace import absent
from ksana_jax.lab.trace.bundle import write_summary
from ksana_jax.lab.trace.functions import CompilationLog
from ksana_jax.lab.trace.roofline import roofline
from ksana_jax.runner.planner.chips import CHIPS, Chip
from ksana_jax.scheduler.step.types import Part, StepShape
from pallas_kernels import aot

MODEL = ModelConfig(
    vocab_size=100, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=24, max_position=64
)
CHIP = Chip("toy", {"bf16": 1000.0}, 10.0)


def test_layers_that_share_keys_and_values_store_half_and_read_all():
    shape, patterns = StepShape((Part(3, 1),), table_width=4, max_sampled=8), (AttentionPattern(),) * 2
    shared = dataclasses.replace(MODEL, kv_layers=(0, 0))
    found = roofline(shared, shape, CHIP, patterns, dtype="bf16", kv_token_bytes=64, context=20)
    assert found.kv_bytes == 64 * (2 * 3 * 20 + 3)


def test_bounds_are_those_of_the_definition():
    shape = StepShape((Part(3, 1), Part(2, 4)), table_width=4, max_sampled=8)
    patterns = (AttentionPattern(), AttentionPattern(window=5))
    found = roofline(MODEL, shape, CHIP, patterns, dtype="bf16", kv_token_bytes=128, context=20)
    tokens = 3 + 2 * 4
    per_layer = 16 * (4 * 8) * 2 + 16 * (2 * 8) * 2 + 3 * 16 * 24  # q and o, k and v, the MLP
    # Tokens at 19, and at 16 to 19, each with itself and all before; or with five.
    pairs = [3 * 20 + 2 * (17 + 18 + 19 + 20), 3 * 5 + 2 * 4 * 5]
    seen = [3 * 20 + 2 * 20, 3 * 5 + 2 * (5 + 3)]
    flops = 2 * tokens * 2 * per_layer + sum(pairs) * 2 * 2 * 4 * 8 + 2 * 5 * 100 * 16
    assert found.flops == flops
    assert found.weight_bytes == 2 * (2 * per_layer + 100 * 16 + tokens * 16)
    assert found.kv_bytes == 128 * (sum(seen) / 2 + tokens)
    assert found.compute_s == flops / 1000 and found.memory_s == (found.weight_bytes + found.kv_bytes) / 10
    assert found.bound == "memory" and found.seconds == found.memory_s
    assert dataclasses.replace(found, compute_s=1e9).bound == "compute"
    of_heads = [pattern for pattern in patterns for _ in range(MODEL.num_kv_heads)]
    assert found == roofline(MODEL, shape, CHIP, of_heads, dtype="bf16", kv_token_bytes=128, context=20)


def test_experts_are_computed_for_their_tokens_and_read_where_chosen():
    experts = dataclasses.replace(MODEL, mlp="swiglu_experts", experts=ExpertsSpec(8, 2))
    for tokens in (1, 3):
        shape = StepShape((Part(tokens, 1),), table_width=4, max_sampled=8)
        settings = {"dtype": "bf16", "kv_token_bytes": 128, "context": 20}
        dense, found = (roofline(m, shape, CHIP, (AttentionPattern(),) * 2, **settings) for m in (MODEL, experts))
        router, expert = 8 * 16, 3 * 16 * 24
        assert found.flops - dense.flops == 2 * tokens * 2 * (router + (2 - 1) * expert)
        read = 8 * (1 - (1 - 2 / 8) ** tokens)
        assert found.weight_bytes - dense.weight_bytes == pytest.approx(2 * 2 * (router + (read - 1) * expert))


def test_a_dtype_without_a_published_rate_is_refused():
    with pytest.raises(ConfigError, match="TPU v5e has no published rate for f16, only for bf16, f32"):
        roofline(MODEL, StepShape((Part(1, 1),), 4, 1), CHIPS["v5e"], (), dtype="f16", kv_token_bytes=1, context=4)


def test_every_target_has_its_published_rates():
    assert set(aot.targets()) <= set(CHIPS)


def test_patterns_that_share_an_engine_are_compiled_once():
    [trials] = absent.engines_of(
        load("quickstart", ["variants=[{name: a}, {name: b, pattern.window: 8}]", "seeds=[0,1]"])
    )
    assert [t.label for t in trials] == ["a", "b"]


@pytest.mark.parametrize("target", ["b200", "h200"])
def test_what_is_not_there_is_one_line_and_leaves_no_folder(target, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pallas_kernels.aot.missing", lambda: "compiling for a GPU needs a plugin; install the extra")
    with pytest.raises(SystemExit) as raised:
        cli.main(["trace", "quickstart", "--target", target, "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().err
    assert raised.value.code == 2 and shown.count("\n") == 1 and not (tmp_path / "out").exists()
    said = {
        "b200": "unknown target 'b200'; there are a100, h100, h200",
        "h200": "compiling for a GPU needs a plugin",
    }
    assert said[target] in shown


@pytest.mark.soak
@pytest.mark.parametrize(("target", "num_devices"), [("h200", 2)])
def test_the_steps_of_an_experiment_are_compiled_for_a_machine_that_is_not_there(target, num_devices, tmp_path):
    try:
        targets.check_target(target)
    except ConfigError as error:
        pytest.skip(str(error))
    words = [
        "quickstart",
        "engine.dtype=bf16",
        "engine.max_num_seqs=8",
        f"engine.tensor_parallel_size={num_devices}",
        "--target",
        target,
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(SystemExit) as raised:
        cli.main(["trace", *words])
    assert raised.value.code == 0
    trace = json.loads((tmp_path / "out/trace.json").read_text())
    [engine] = trace["engines"]
    assert engine["implementation"] == "hopper"
    assert len(trace["functions"]) == 3 and len(engine["steps"]) == 3 * 6  # six patterns; recomputation has a window's
    assert all(s["computed_s"] > 0 and s["temp_bytes"] > 0 for s in engine["steps"])
    sums = 2 * engine["num_layers"] + 1  # after attention and the MLP of each layer, and of embeddings
    for step in engine["steps"]:
        assert [(c["kind"], c["number"]) for c in step["collectives"]] == [("all-reduce", sums)] * (num_devices > 1)
    assert "Computed, not measured" in (tmp_path / "out/index.html").read_text()


def test_the_page_of_an_absent_machine_marks_its_times_as_computed(tmp_path):
    shape = StepShape((Part(3, 1),), 4, 3)
    bound = roofline(MODEL, shape, CHIP, (AttentionPattern(),) * 2, dtype="bf16", kv_token_bytes=128, context=20)
    engine = {
        "engine": 1,
        "family": "llama",
        "num_layers": 2,
        "implementation": "hopper",
        "platform": "gpu",
        "num_devices": 4,
        "num_blocks": 100,
        "memory_bytes": 2**34,
        "patterns": "full",
        "config": {"dtype": "bf16"},
        "steps": [absent.plain_step(shape, "full", 20, bound, [])],
    }
    target = {"name": "toy", "chip": dataclasses.asdict(CHIP)}
    write_summary(tmp_path, "ksana trace", 0.0, CompilationLog(tmp_path), target=target, engines=[engine])
    shown = (tmp_path / "index.html").read_text()
    assert "Computed, not measured: the least time of a step on toy" in shown and "computed: memory ms" in shown
    assert f"{1e3 * bound.memory_s:.4f}" in shown and shown.count("<td>full</td>") == 1
    assert "4 devices divide the model" in shown and "a device has 16" in shown
