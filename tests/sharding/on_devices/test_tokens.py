"""The same tokens from one device and from several, whatever the model, the pattern and how KV is stored."""

import dataclasses

import jax
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, Steering
from ksana_jax.devices.tuning import tuning
from ksana_jax.lab.align.command import TextSet, align, report
from ksana_jax.models.joined import separate
from ksana_jax.models.params import init_params
from ksana_jax.ops.implementations import Implementation, PagedAttention
from ksana_jax.ops.kernels import Kernels
from ksana_jax.runner import programs
from ksana_jax.sharding.tensor_parallel import TensorParallel
from pallas_kernels.registry import KERNELS
from tests.sharding.on_devices.engines import (
    GREEDY,
    MHA,
    MIXED,
    MODELS,
    PROMPTS,
    SETTINGS,
    alone,
    asked,
    expected,
    make_llm,
    params_of,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Kv heads of its own on each device, more of them, and one that devices share. All of n in 2, 4, 8 for each model had
# equal tokens once; these are what there is time for.
DIVIDED = [("MHA", 8), ("MLA", 2), ("GQA", 2), ("GQA", 8), ("MQA", 4)]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "num_devices"), DIVIDED)
def test_greedy_and_seeded_tokens(name, num_devices):
    llm = alone(name, num_devices)
    assert len(llm.runner.cache.kv.sharding.device_set) == num_devices
    assert tokens_of(llm) == expected(name)


@pytest.mark.soak
@pytest.mark.parametrize("num_devices", [8])
def test_log_probabilities(num_devices):
    params = asked(temperature=1.0, seed=7, logprobs=3, prompt_logprobs=2)
    one, several = (alone("GQA", n).generate(PROMPTS, params) for n in (1, num_devices))
    for a, b in zip(one, several, strict=True):
        for x, y in zip([*a.outputs[0].logprobs, *a.prompt_logprobs], [*b.outputs[0].logprobs, *b.prompt_logprobs]):
            assert (x is None and y is None) or list(x) == list(y)
            for token in x or ():
                assert x[token].rank == y[token].rank
                # Sums of 32 and 64 products in another order, through two layers.
                np.testing.assert_allclose(x[token].logprob, y[token].logprob, atol=2e-5)


# Engines that compile one shape of steps.
ONE_SHAPE = {"max_num_batched_tokens": 2, "query_tile": 1, "max_num_seqs": 2}

PATTERNS = {
    "window": AttentionPattern(window=11),
    "sinks at cache positions": AttentionPattern(window=11, num_sinks=2, sink_position="cache"),
    "sinks at a ceiling": AttentionPattern(window=11, num_sinks=3, sink_position="ceiling"),
    "dilated": AttentionPattern(window=16, stride=2),
    "global": AttentionPattern(window=11, global_every=4),
}


@pytest.mark.soak
def test_patterns():
    several, one = (make_llm("GQA", n, max_repositioned_sinks=3) for n in (4, 1))
    for name, pattern in PATTERNS.items():
        for llm in (several, one):
            llm.set_pattern(pattern)
        assert tokens_of(several) == tokens_of(one), name


@pytest.mark.soak
@pytest.mark.parametrize(("attention", "linear"), [("native", "mixed")])
def test_implementations(attention, linear):
    llm = make_llm("GQA", 8, operators={"attention": attention, "linear": linear})
    assert (llm.runner.implementation.name, llm.config.operators.linear) == (attention, linear)
    assert tokens_of(llm) == expected("GQA")


@pytest.mark.soak
@pytest.mark.parametrize(("name", "num_devices"), DIVIDED[3:])
def test_weights_that_multiply_the_same_input_joined_on_each_device(name, num_devices, monkeypatch):
    joins = dataclasses.replace(tuning("cpu"), joins_matrices=True)
    monkeypatch.setattr(programs, "tuning", lambda platform: joins)
    llm = make_llm(name, num_devices)
    layer, given = llm.runner.params.layers[0], TensorParallel(jax.devices()[:num_devices])
    assert layer.w_q is layer.w_gate is None and layer.w_qkv is not None
    assert tokens_of(llm) == expected(name)
    placed = given.params(MODELS[name], params_of(name))
    again = separate(llm.runner.params, MODELS[name])
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(again), jax.tree.leaves(placed), strict=True):
        assert ours.sharding == theirs.sharding, path
        np.testing.assert_array_equal(ours, theirs, err_msg=str(path))


@pytest.mark.soak
def test_kernels_of_a_gpu_see_the_heads_of_one_device(monkeypatch):
    """Triton kernels in Pallas's interpreter, which take float16 and heads of 64."""
    kernels = Kernels(*(KERNELS[name].tuned(interpret=True) for name in ("triton_decode", "triton_ragged")))
    made = Implementation("triton", lambda: PagedAttention(kernels.write, kernels.attend), lambda needs: None)
    monkeypatch.setattr(programs, "choose", lambda needs, name: made)
    model = dataclasses.replace(MHA, num_kv_heads=2, head_dim=64)
    params = init_params(model, 3, "float16", std=0.3)
    config = SETTINGS | ONE_SHAPE | {"dtype": "f16", "num_blocks": 16, "max_model_len": 64}
    few = [dataclasses.replace(GREEDY, max_tokens=4)] * 2
    one, several = (LLM.from_params(model, params, tensor_parallel_size=n, **config) for n in (1, 4))
    assert tokens_of(several, few, PROMPTS[3:5]) == tokens_of(one, few, PROMPTS[3:5])


def test_rows_are_steered():
    model = MODELS["GQA"]
    steering = Steering({0: np.linspace(-2, 2, model.d_model)}, {1: [0, model.num_heads - 1]})
    params = [dataclasses.replace(p, steering=steering if n % 2 else None) for n, p in enumerate(MIXED)]
    several, one = (tokens_of(alone("GQA", n), params) for n in (4, 1))
    assert several == one != expected()


@pytest.mark.parametrize("kv", [pytest.param(kv, marks=pytest.mark.soak) for kv in ("int8", "kivi4")])
def test_codecs(kv):
    one, several = (make_llm("GQA", n, kv_cache_dtype=kv) for n in (1, 4))
    assert several.block_bytes == one.block_bytes
    assert tokens_of(several) == tokens_of(one)


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"quantization": "w8a8"},
        {"kv_cache_dtype": "int8", "kv_full_precision_layers": (1,)},
        {"num_scheduler_steps": 4},
        {"async_scheduling": False, "block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 7},
        {"shared_prefix_attention": True, "enable_prefix_caching": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(settings):
    if "kv_full_precision_layers" in settings:
        pattern = [AttentionPattern(), AttentionPattern()]
    else:
        pattern = None
    one, several = (make_llm("GQA", n, pattern=pattern, **settings) for n in (1, 4))
    assert tokens_of(several) == tokens_of(one)


@pytest.mark.soak
def test_samples_and_beams():
    for params in (asked(n=3, temperature=1.0, seed=1), asked(beam_width=3, max_tokens=8)):
        assert tokens_of(alone("GQA", 4), params) == tokens_of(alone("GQA"), params)


def test_a_few_tokens():
    """In every run of the tests: two kv heads on four devices, tokens greedy and drawn from a nucleus."""
    prompts, params = PROMPTS[2:5], [GREEDY, asked(temperature=0.7, seed=2, top_p=0.9), GREEDY]
    one, several = (make_llm("GQA", n, **ONE_SHAPE) for n in (1, 4))
    assert len(several.runner.cache.kv.sharding.device_set) == 4
    assert tokens_of(several, params, prompts) == tokens_of(one, params, prompts)


@pytest.mark.soak
def test_two_engines_are_aligned_by_tokens_and_log_probabilities():
    """With scores of prompts alone, of which no most probable tokens are asked for."""
    found = align(alone("GQA"), alone("GQA", 4), TextSet(num_prompts=2, prompt_tokens=5, num_tokens=6, seed=0))
    assert found["tokens"] == {} and found["operators"] == [] and found["divided"] == 4
    assert found["logprobs"]["quantiles"]["1"] < 2e-5  # as in test_log_probabilities
    assert report(found)[-1] == "operators are not compared one by one: 4 devices have a part of each"
