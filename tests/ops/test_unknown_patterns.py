"""A field added to attention patterns is refused by kernels that do not read it; the XLA reference takes over."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from ksana_jax import AttentionPattern
from ksana_jax.cli import app
from ksana_jax.core import patterns
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.operator_settings import OperatorSettings
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.models.params import init_params
from ksana_jax.ops import implementations
from ksana_jax.ops.gpu_kernels import HOPPER, TRITON
from ksana_jax.ops.implementations import choose, explain
from ksana_jax.ops.kernels import kernel_pattern
from ksana_jax.ops.requirements import Requirements
from ksana_jax.runner.runner import Runner
from ksana_jax.sharding.placement import Placement
from tests.test_recipes import Chunked, ChunkedArrays

LLAMA = ModelConfig(num_heads=32, num_kv_heads=8, head_dim=128)
LAYOUT = layout_of(LLAMA, dtype="bf16", block_size=64)
REASON = "attention patterns have span, which the kernels do not read"


@pytest.fixture
def one_more_field(monkeypatch):
    monkeypatch.setattr(patterns, "PatternArrays", ChunkedArrays)


class GPU(NamedTuple):
    compute_capability: str
    platform: str = "gpu"


def needs_on(compute_capability: str) -> Requirements:
    return Requirements.of(LLAMA, LAYOUT, device=GPU(compute_capability))


@pytest.mark.parametrize("capability", ["9.0", "8.0"])
def test_auto_falls_back_to_the_reference_and_says_why(one_more_field, capability):
    needs = needs_on(capability)
    assert choose(needs).name == "xla"
    reasons = {name: why for name, _, why in explain(needs)}
    assert reasons["triton"] == REASON and reasons["xla"] == "preferred here"
    assert reasons["hopper"] == (
        REASON if capability == "9.0" else "needs an NVIDIA GPU of compute capability 9.0, this is gpu 8.0"
    )
    with pytest.raises(ValueError, match=rf"operators\.attention 'triton': {REASON}"):
        choose(needs, "triton")


class Described(Placement):
    """A device that exists only as a description."""

    def everywhere(self, tree):
        return tree


def runner_on(device, attend: str = "auto") -> Runner:
    """A runner that compiles but runs nothing."""
    params = jax.eval_shape(lambda: init_params(LLAMA, dtype=jnp.bfloat16))
    return Runner(
        LLAMA,
        params,
        [AttentionPattern()] * LLAMA.num_layers,
        layout=LAYOUT,
        num_blocks=4,
        max_model_len=128,
        max_repositioned_sinks=0,
        settings=OperatorSettings(attention=attend),
        placement=Described(device),
    )


def test_an_engine_on_a_gpu_leaves_its_kernels_for_a_pattern_that_they_do_not_read(monkeypatch):
    assert runner_on(GPU("9.0")).implementation.name == "hopper"
    monkeypatch.setattr(patterns, "PatternArrays", ChunkedArrays)
    assert runner_on(GPU("9.0")).implementation.name == "xla"
    with pytest.raises(ValueError, match=REASON):
        runner_on(GPU("9.0"), "hopper")


def test_doctor_says_why_the_kernels_are_not_used(one_more_field, monkeypatch):
    monkeypatch.setattr(implementations, "example_needs", lambda: needs_on("9.0"))
    output = " ".join(CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).output.split())
    assert f"attention hopper {REASON}" in output and f"attention triton {REASON}" in output
    assert "attention xla yes" in output


def test_a_kernel_that_is_called_all_the_same_refuses(one_more_field):
    layer = Chunked(span=4).arrays()
    with pytest.raises(NotImplementedError, match=REASON):
        kernel_pattern(layer)
    where = types.SimpleNamespace(pattern=layer)
    with pytest.raises(NotImplementedError, match=REASON):
        HOPPER.schedule(where, None, 4)
    assert TRITON.decode.schedule is None  # `attend` asks for the pattern in each call
