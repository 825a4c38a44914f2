"""A field added to attention patterns is refused by kernels that do not read it, and the XLA reference takes over."""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from ksana_jax import LLM, AttentionPattern, SamplingParams, patterns
from ksana_jax.cli import app
from ksana_jax.config import ModelConfig
from ksana_jax.kv.layout import KVLayout
from ksana_jax.ops import implementations
from ksana_jax.ops.implementations import choose, explain
from ksana_jax.ops.kernels import HOPPER, TRITON, kernel_pattern
from ksana_jax.ops.requirements import Requirements
from ksana_jax.patterns import FAR, PatternArrays
from ksana_jax.runner.runner import Runner
from tests import reference
from tests.engine.small import VOCAB, model

LLAMA = ModelConfig(num_heads=32, num_kv_heads=8, head_dim=128)
LAYOUT = KVLayout.of(LLAMA, dtype="bf16", block_size=64, platform="gpu")
REASON = "attention patterns have span, which the kernels do not read"


class SpannedArrays(NamedTuple):
    """`PatternArrays` with one more number: queries see only keys of their own span of so many tokens."""

    window: Any
    num_sinks: Any
    stride: Any
    has_global: Any
    global_every: Any
    sink_position: Any
    sink_ceiling: Any
    span: Any = np.int32(FAR)

    def layer(self, index: int) -> "SpannedArrays":
        return SpannedArrays(*(a[index] for a in self))

    def visible(self, q_pos, kv_pos):
        return PatternArrays(*self[:-1]).visible(q_pos, kv_pos) & (q_pos // self.span == kv_pos // self.span)


@dataclasses.dataclass(frozen=True)
class Spanned(AttentionPattern):
    span: int = FAR

    def arrays(self):
        return super().arrays()._replace(span=np.int32(self.span))


@pytest.fixture
def one_more_field(monkeypatch):
    monkeypatch.setattr(patterns, "PatternArrays", SpannedArrays)


def gpu(compute_capability: str):
    return types.SimpleNamespace(platform="gpu", compute_capability=compute_capability)


def needs_on(compute_capability: str) -> Requirements:
    return Requirements.of(LLAMA, LAYOUT, device=gpu(compute_capability))


@pytest.mark.parametrize("capability", ["9.0", "8.0"])
def test_auto_falls_back_to_the_reference_and_says_why(one_more_field, capability):
    needs = needs_on(capability)
    assert choose(needs).name == "xla"
    reasons = {name: why for name, _, why in explain(needs)}
    assert reasons["triton"] == REASON and reasons["xla"] == "preferred here"
    assert reasons["hopper"] == (
        REASON if capability == "9.0" else "needs an NVIDIA GPU of compute capability 9.0, this is gpu 8.0"
    )
    with pytest.raises(ValueError, match=f"attention_implementation 'triton': {REASON}"):
        choose(needs, "triton")


def runner_on(device, attend: str = "auto") -> Runner:
    """A runner that compiles but runs nothing."""
    params = types.SimpleNamespace(final_norm=jax.ShapeDtypeStruct((LLAMA.d_model,), jnp.bfloat16))
    return Runner(
        LLAMA,
        params,
        [AttentionPattern()] * LLAMA.num_layers,
        layout=LAYOUT,
        num_blocks=4,
        max_model_len=128,
        max_rotated_sinks=0,
        attention=attend,
        device=device,
    )


def test_an_engine_on_a_gpu_leaves_its_kernels_for_a_pattern_that_they_do_not_read(monkeypatch):
    assert runner_on(gpu("9.0")).implementation.name == "hopper"
    monkeypatch.setattr(patterns, "PatternArrays", SpannedArrays)
    assert runner_on(gpu("9.0")).implementation.name == "xla"
    with pytest.raises(ValueError, match=REASON):
        runner_on(gpu("9.0"), "hopper")


def test_doctor_says_why_the_kernels_are_not_used(one_more_field, monkeypatch):
    monkeypatch.setattr(implementations, "explain", functools.partial(explain, needs_on("9.0")))
    output = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
    assert f"not used hopper: {REASON}" in output and f"not used triton: {REASON}" in output
    assert "used xla: preferred here" in output


def test_a_kernel_that_is_called_all_the_same_refuses(one_more_field):
    layer = Spanned(span=4).arrays()
    with pytest.raises(NotImplementedError, match=REASON):
        kernel_pattern(layer)
    where = types.SimpleNamespace(pattern=layer)
    with pytest.raises(NotImplementedError, match=REASON):
        HOPPER.schedule(where, None, 4)
    assert TRITON.decode.schedule is None  # `attend` asks for the pattern in each call


def test_the_reference_computes_the_new_pattern(one_more_field, monkeypatch):
    literal = reference.literal

    def spanned(pattern, i, j):
        visible, stands = literal(pattern, i, j)
        return visible & (i // pattern.span == j // pattern.span), stands

    monkeypatch.setattr(reference, "literal", spanned)
    config, params = model()
    pattern = Spanned(span=7)
    llm = LLM.from_params(config, params, pattern=pattern, block_size=4, num_blocks=16, max_num_seqs=2)
    text = np.random.default_rng(0).integers(2, VOCAB, 30)
    [output] = llm.generate(
        {"prompt_token_ids": text}, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    )
    got = [entry[int(t)].logprob for t, entry in zip(text, output.prompt_logprobs, strict=True) if entry]
    expected = reference.reference_logprobs(params, config, text, pattern)
    np.testing.assert_allclose(got, [expected[t - 1, text[t]] for t in range(1, len(text))], atol=1e-4)
    full = reference.reference_logprobs(params, config, text, Spanned())
    assert np.abs(full - expected).max() > 0.1
