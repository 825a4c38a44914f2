"""Memory of a compiled step: measured on the program itself, the same before and after it has served requests."""

import dataclasses

import jax
import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.runner.planner import step_memory
from ksana_jax.runner.planner.step_memory import measure_step, program_bytes, step_bytes
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from pallas_kernels import aot
from tests.engine.small import SMALL, Letters, make_llm, model

WIDE = ModelConfig(
    vocab_size=512, d_model=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32, d_ff=256, max_position=4096
)
SHAPE = StepShape((TileGroup(8, 1), TileGroup(1, 32)), 16, max_sampled=8)


@pytest.fixture(scope="module")
def llm():
    return make_llm(Letters(), programs={})


def test_a_steps_buffers_are_those_of_its_bucket_however_much_was_served(llm):
    llm.warm_up(sampling_params=SamplingParams(temperature=1.0))
    steps = {key: program_bytes(p) for key, p in llm.runner.programs.items() if isinstance(key, StepShape)}
    rng = np.random.default_rng(0)
    sampled = SamplingParams(temperature=1.0, max_tokens=4, seed=0, detokenize=False)
    for num_requests in (3, 40):
        llm.generate([{"prompt_token_ids": rng.integers(2, 60, 12)} for _ in range(num_requests)], sampled)
    # The programs that served are those that were compiled ahead; each has its buffers, whoever is served.
    assert {k: program_bytes(p) for k, p in llm.runner.programs.items() if isinstance(k, StepShape)} == steps
    config, _ = model()
    planned = step_bytes(config, list(steps), dtype="f32", block_size=SMALL["block_size"])
    assert [found.network for found in planned] == list(steps.values())


def test_a_steps_buffers_are_small_beside_a_copy_of_the_pool(llm):
    """The pool is donated and updated in place: whatever its size, a step has no room for another one."""
    for step in (p for key, p in llm.runner.programs.items() if isinstance(key, StepShape)):
        donated = [p.memory_analysis() for p in compiled_programs(step) if p.memory_analysis().alias_size_in_bytes]
        assert len(donated) == 1, "both layers are alike"
        assert donated[0].alias_size_in_bytes >= llm.runner.cache.nbytes
        assert donated[0].output_size_in_bytes - donated[0].alias_size_in_bytes < 2**14


@pytest.mark.parametrize(("num_layers", "num_kv_heads"), [(1, 4), (2, 1), (2, 2)])
def test_a_step_has_no_room_for_a_copy_of_a_pool_with_an_axis_of_one(num_layers, num_kv_heads):
    """Layers of one head, or a single layer: XLA's layouts leave the place of such an axis open."""
    config = dataclasses.replace(WIDE, num_layers=num_layers, num_kv_heads=num_kv_heads)
    [found] = step_bytes(config, [SHAPE], dtype="f32", block_size=16)
    layout = layout_of(config, dtype="f32", block_size=16, as_bits=tuning("cpu").stored_as_bits)
    assert found.network < step_memory.NUM_BLOCKS * layout.block_bytes / 4


def test_a_layer_that_reads_another_layers_keys_has_no_room_for_a_copy_of_the_pool():
    """Two layers are compiled as they are; of more, the bytes follow from layers with keys of their own."""
    shared = dataclasses.replace(WIDE, kv_layers=(0, 0))
    [found] = step_bytes(shared, [SHAPE], dtype="f32", block_size=16)
    layout = layout_of(shared, dtype="f32", block_size=16, as_bits=tuning("cpu").stored_as_bits)
    assert found.network < step_memory.NUM_BLOCKS * layout.block_bytes / 4
    [many] = step_bytes(
        dataclasses.replace(WIDE, num_layers=5, kv_layers=(0,) * 5), [SHAPE], dtype="f32", block_size=16
    )
    assert 0 < many.network < 2 * found.network


@pytest.mark.soak
def test_a_steps_bytes_are_predicted_from_other_shapes():
    """Three shapes are compiled: other rows and widths follow."""
    cost = measure_step(WIDE, dtype="f32", max_num_batched_tokens=32)
    [compiled] = step_bytes(
        WIDE, [StepShape((TileGroup(96, 1), TileGroup(1, 32)), 96, max_sampled=96)], dtype="f32", block_size=16
    )
    # XLA assigns buffers to places of its own choice, so that sizes are not quite linear.
    assert cost.bytes(96, 96) == pytest.approx(compiled.peak, rel=0.02)
    assert cost.line(96, 96).alpha(96) > 0
    assert cost.target.startswith(f"cpu (cpu), jax {jax.__version__}")


def test_a_deep_models_step_takes_on_a_cpu_what_a_shallow_ones_takes():
    few, deep = (
        step_bytes(dataclasses.replace(WIDE, num_layers=n), [SHAPE], dtype="f32", block_size=16)[0] for n in (4, 8)
    )
    patterns = 7 * 4 * (8 - 4)  # seven numbers for each layer
    assert deep.network - few.network == patterns and deep.sampling == few.sampling


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_of_a_deep_model_two_and_three_layers_are_compiled_for_a_gpu(monkeypatch):
    deep, compiling = dataclasses.replace(WIDE, num_layers=5), {"dtype": "bf16", "block_size": 16}
    target = aot.target("a100")
    [extrapolated] = step_bytes(deep, [SHAPE], target=target, **compiling)
    monkeypatch.setattr(step_memory, "ONE_MORE", 5)  # now all five are
    [compiled] = step_bytes(deep, [SHAPE], target=target, **compiling)
    assert extrapolated.network == pytest.approx(compiled.network, rel=0.05)
    assert extrapolated.sampling == compiled.sampling


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_steps_are_compiled_for_a_gpu_that_is_not_here():
    [there] = step_bytes(WIDE, [SHAPE], dtype="bf16", block_size=16, target=aot.target("a100"))
    # Keys and values rest where they are: an implementation without kernels would gather those of all tables.
    gathered = SHAPE.num_tiles * SHAPE.table_width * 16 * 2 * WIDE.num_kv_heads * WIDE.head_dim * 2
    assert 0 < there.network < gathered / 2
    assert step_memory.described(aot.target("a100")).startswith("gpu (NVIDIA A100")
