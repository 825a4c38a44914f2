"""The engine asks the planner for the size of its pool, and reports afterwards how right that was."""

import logging

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.runner.planner import engine as planner_engine
from ksana_jax.runner.planner import plan, pool_size
from ksana_jax.runner.planner.devices import Device
from ksana_jax.runner.planner.engine import Compared
from ksana_jax.runner.planner.step_memory import StepBytes, step_bytes
from ksana_jax.scheduler.step.ladders import all_shapes, largest_shapes, make_buckets
from ksana_jax.scheduler.step.shared_prefix import SHARED_ROWS
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from tests.engine.small import SMALL, model
from tests.runner.planner.models import STEP

MIB = 2**20
BLOCK_BYTES = 16 * 2 * 2 * 2 * 8 * 4  # block_size * (keys, values) * L * K * H * 4


@pytest.fixture
def device(monkeypatch):
    """A device of one MiB."""
    monkeypatch.setattr(planner_engine, "this_device", lambda num_devices: Device("one MiB", MIB))


@pytest.fixture
def steps(device, monkeypatch):
    """Nothing is compiled: a step takes as many KiB as it has tokens; returns the shapes that were asked for."""
    shapes = []

    def step_bytes(_, asked, **_settings):
        shapes.extend(asked)
        return [StepBytes(1024 * shape.num_tokens, 100) for shape in asked]

    monkeypatch.setattr(planner_engine, "step_bytes", step_bytes)
    return shapes


def sized(**settings):
    config, _ = model()
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "query_tile": 16}
    asked = EngineConfig(**few | {"max_model_len": 64, "max_repositioned_sinks": 0} | settings)
    layout = layout_of(config, dtype=asked.dtype, block_size=asked.block_size, as_bits=tuning("cpu").stored_as_bits)
    return pool_size(config, asked, layout)


def test_a_number_of_blocks_is_taken_as_it_is():
    assert (found := sized(num_blocks=7)).num_blocks == 7
    assert found.pool_bytes == 7 * BLOCK_BYTES


def test_the_pool_holds_what_the_sequences_need_within_a_byte_budget():
    assert sized().num_blocks == 4 * 4
    assert sized(memory_bytes=5 * BLOCK_BYTES + 1).num_blocks == 5
    with pytest.raises(ConfigError, match="a KV block takes 4,096 bytes, memory_bytes is 4,095"):
        sized(memory_bytes=BLOCK_BYTES - 1)


def test_a_pool_beyond_the_memory_that_others_leave_is_refused(device, monkeypatch):
    monkeypatch.setattr(planner_engine, "available_bytes", lambda: 5 * BLOCK_BYTES)
    assert sized(num_blocks=5).num_blocks == 5
    with pytest.raises(ConfigError, match=r"6 KV blocks .*, one MiB has 1.0 MiB, 20.0 KiB of it unused: set num_bl"):
        sized(num_blocks=6)


def test_memory_fraction_is_for_weights_step_and_pool_together(steps):
    found = sized(memory_fraction=0.5, enable_prefix_caching=True)
    assert found.step_bytes == 1024 * (4 + 16)  # of the largest bucket
    taken = found.weights_bytes + found.step_bytes + found.pool_bytes
    assert taken <= MIB // 2 < taken + BLOCK_BYTES
    # Without a prefix cache nobody would use more than all sequences need.
    assert sized(memory_fraction=0.5).num_blocks == min(16, found.num_blocks)


def test_a_device_without_room_for_a_block_is_refused_with_the_figures(steps):
    with pytest.raises(ConfigError) as raised:
        sized(memory_fraction=0.01)
    message = str(raised.value)
    assert "memory_fraction 0.01 of 1.0 MiB (one MiB)" in message and "a KV block of 4,096 bytes" in message
    assert "\n" not in message


EXACT = {"kv_cache_dtype": "int8", "kv_full_precision_layers": [0]}
EVICTING = EXACT | {"kv_eviction": {"method": "h2o", "budget": 20, "prompts": "streamed"}}


@pytest.mark.parametrize("stored", [{}, pytest.param(EVICTING, marks=pytest.mark.soak)], ids=["everything", "evicting"])
def test_an_engine_sized_by_memory_fraction_logs_predicted_and_measured(stored, device, caplog):
    config, params = model()
    settings = SMALL | {"num_blocks": None, "max_num_seqs": 1, "max_model_len": 16, "memory_fraction": 0.6} | stored
    llm = LLM.from_params(config, params, **settings)
    with caplog.at_level(logging.INFO, "ksana_jax"):
        llm.warm_up(sampling_params=SamplingParams(temperature=1.0))
    logged = {r.args[0]: r.args[1] for r in caplog.records if r.name == "ksana_jax" and "memory of" in r.msg}
    assert list(logged) == ["weights", "pool", "step", "peak"]
    for name in ("weights", "pool", "step"):
        assert isinstance(logged[name], Compared) and logged[name].predicted == logged[name].measured
    assert logged["pool"].measured == llm.num_blocks * llm.block_bytes
    assert (llm.block_bytes == BLOCK_BYTES) != bool(stored)
    assert logged["peak"].measured > logged["weights"].measured
    assert "predicted" in str(logged["peak"]) and "measured" in str(logged["peak"])


@pytest.mark.parametrize("stored", [{}, EXACT, EVICTING], ids=["everything", "exact layer", "evicting"])
def test_a_plan_of_one_request_has_the_bytes_of_an_engines_pool(stored):
    config, params = model()
    context = {"max_num_batched_tokens": 16, "query_tile": 16, "block_size": 4}
    llm = LLM.from_params(config, params, max_num_seqs=1, max_model_len=60, **context, **stored)
    stored = stored | {"kv_full_precision_layers": tuple(stored.get("kv_full_precision_layers", ()))}
    found = plan(config, "1GiB", step=STEP, dtype="f32", batch=1, context=60, **context, **stored)
    assert found.kv_bytes_per_token == llm.runner.layout.token_bytes
    assert found.kv_bytes_per_token * found.tokens_held == llm.memory_plan.pool_bytes == llm.runner.cache.nbytes
    assert (found.tokens_held < 30) == ("kv_eviction" in stored)


def test_evictions_are_among_the_programs_of_a_step():
    wide = ModelConfig(vocab_size=8, d_model=8, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=64, d_ff=8)
    shape, settings = StepShape((TileGroup(1, 1),), 4, 1), {"dtype": "f32", "block_size": 16, "max_model_len": 64}
    [plain] = step_bytes(wide, [shape], **settings)
    [evicting] = step_bytes(wide, [shape], kv_eviction={"method": "window", "budget": 32}, **settings)
    assert plain.evicting == 0
    # One call reads and writes the tokens of 64 blocks, which are more than one query attends to.
    assert evicting.evicting >= 64 * 16 * 2 * 2 * 8 * 64 * 4 and evicting.peak == evicting.evicting > plain.peak


def test_the_shapes_looked_at_are_the_engines_largest_with_tiles_of_each_width(steps):
    sized(memory_fraction=0.9, max_num_seqs=16, max_num_batched_tokens=64)
    assert steps == [StepShape((TileGroup(16, 1), tiles), 4, 16) for tiles in (TileGroup(4, 16), TileGroup(16, 4))]
    steps.clear()
    sized(memory_fraction=0.9, max_num_seqs=16, shared_prefix_attention=True)
    assert steps[-1] == StepShape((TileGroup(16, 1), TileGroup(1, 16)), 4, 16, SHARED_ROWS)


@pytest.mark.soak
def test_no_step_takes_more_than_the_largest_though_one_sequence_runs():
    """With one row XLA:CPU would make a bfloat16 output head float32."""
    wide = ModelConfig(vocab_size=8192, d_model=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32, d_ff=64)
    asked = EngineConfig(dtype="bf16", max_num_seqs=1, max_num_batched_tokens=16, query_tile=16, max_model_len=16)
    buckets = make_buckets(asked, "cpu")
    largest, every = (
        max(found.peak for found in step_bytes(wide, shapes, dtype="bf16", block_size=16))
        for shapes in (largest_shapes(buckets), all_shapes(buckets))
    )
    assert every == largest < 8192 * 64 * 4


def test_compared_says_what_is_known():
    assert str(Compared(None, None)) == "not known"
    assert str(Compared(None, 2 * MIB)) == "2.0 MiB measured"
    assert str(Compared(3 * MIB, 2 * MIB)) == "3.0 MiB predicted, 2.0 MiB measured, +50.0 %"
