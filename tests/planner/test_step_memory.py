"""What a compiled step takes: measured on the program itself, the same before and after it has served requests."""

import dataclasses

import jax
import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.config import ModelConfig
from ksana_jax.planner import step_memory
from ksana_jax.planner.step_memory import measure_step, program_bytes, step_bytes
from ksana_jax.step.contract import Part, StepShape
from pallas_kernels import aot
from tests.engine.small import SMALL, Letters, make_llm, model

WIDE = ModelConfig(
    vocab_size=512, d_model=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32, d_ff=256, max_position=4096
)
SHAPE = StepShape((Part(8, 1), Part(1, 32)), 16, max_sampled=8)


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
    for compiled in (p for key, p in llm.runner.programs.items() if isinstance(key, StepShape)):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= llm.runner.cache.nbytes
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**14


def test_a_steps_bytes_are_predicted_from_other_shapes():
    """Three shapes are compiled: other rows and widths follow."""
    cost = measure_step(WIDE, dtype="f32", max_num_batched_tokens=32)
    [compiled] = step_bytes(
        WIDE, [StepShape((Part(96, 1), Part(1, 32)), 96, max_sampled=96)], dtype="f32", block_size=16
    )
    # XLA assigns buffers to places of its own choice, so that sizes are not quite linear.
    assert cost.bytes(96, 96) == pytest.approx(compiled.peak, rel=0.02)
    assert cost.line(96, 96).alpha(96) > 0
    assert cost.target.startswith(f"cpu (cpu), jax {jax.__version__}")


def test_of_a_deep_model_two_and_three_layers_are_compiled(monkeypatch):
    """A further layer adds as much as the third did: on XLA:CPU that is exact to a few percent."""
    deep = dataclasses.replace(WIDE, num_layers=5)
    [extrapolated] = step_bytes(deep, [SHAPE], dtype="f32", block_size=16)
    monkeypatch.setattr(step_memory, "ONE_MORE", 5)  # now all five are
    [compiled] = step_bytes(deep, [SHAPE], dtype="f32", block_size=16)
    assert extrapolated.network == pytest.approx(compiled.network, rel=0.05)
    assert extrapolated.sampling == compiled.sampling


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_steps_are_compiled_for_a_gpu_that_is_not_here():
    [here] = step_bytes(WIDE, [SHAPE], dtype="bf16", block_size=16)
    [there] = step_bytes(WIDE, [SHAPE], dtype="bf16", block_size=16, target=aot.target("a100"))
    # What attention gathers on the CPU rests where it is on a GPU with kernels.
    assert 0 < there.network < here.network
    assert step_memory.described(aot.target("a100")).startswith("gpu (NVIDIA A100")
