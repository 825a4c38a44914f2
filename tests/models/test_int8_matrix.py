"""Weights as int8 codes: rounding, products, memory, and an engine that serves with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.loading.load import abstract_params
from ksana_jax.models.int8_matrix import Int8Matrix, quantise
from ksana_jax.models.layers import linear
from ksana_jax.models.params import init_params, quantised
from ksana_jax.runner.planner.terms import weights_bytes

CONFIG = ModelConfig(vocab_size=64, d_model=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=72)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False)
PROMPT = {"prompt_token_ids": list(range(5, 45))}


def exact(matrix: Int8Matrix) -> np.ndarray:
    return np.asarray(matrix.codes, np.float64) * np.asarray(matrix.scales, np.float64)[:, None]


def test_codes_are_within_half_a_step_of_each_row_of_weights():
    w = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32) * np.logspace(-3, 3, 7)[:, None]
    w[3] = 0
    found = quantise(jnp.asarray(w, jnp.float32))
    steps = np.abs(w).max(axis=1, keepdims=True) / 127
    assert (np.abs(exact(found) - w) <= steps * 0.5001).all()
    assert np.abs(np.asarray(found.codes, int)).max(axis=1).tolist() == [127, 127, 127, 0, 127, 127, 127]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_codes_are_those_with_the_numbers_they_stand_for(dtype):
    rng = np.random.default_rng(1)
    x, b = jnp.asarray(rng.normal(size=(3, 5, 48)), dtype), jnp.asarray(rng.normal(size=24), dtype)
    w = quantise(jnp.asarray(rng.normal(size=(24, 48)), jnp.float32))
    expected = np.asarray(x, np.float64) @ exact(w).T + np.asarray(b, np.float64)
    found = linear(x, w, b, dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_an_engine_computes_with_the_numbers_that_codes_stand_for():
    params = init_params(CONFIG, seed=0)
    as_codes = quantised(params, "int8")
    back = [
        layer.replace(**{name: jnp.asarray(exact(m), jnp.float32) for name, m in vars(layer).items() if is_codes(m)})
        for layer in as_codes.layers
    ]
    assert sum(is_codes(m) for m in vars(as_codes.layers[0]).values()) == 7
    settings = {"max_num_seqs": 2, "max_model_len": 64}
    engines = [
        LLM.from_params(CONFIG, params, quantization="int8", **settings),
        LLM.from_params(CONFIG, params.replace(layers=tuple(back)), **settings),
    ]
    found, expected = (logprobs(llm.generate([PROMPT], GREEDY)[0]) for llm in engines)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    unquantised = logprobs(LLM.from_params(CONFIG, params, **settings).generate([PROMPT], GREEDY)[0])
    assert np.abs(np.subtract(found, unquantised)).max() > 1e-4
    plan, used = engines[0].memory_plan, engines[0].runner.params
    assert plan.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(used))
    packs = engines[0].config.operators.linear == "packed"
    assert plan.weights_bytes == weights_bytes(CONFIG, "f32", quantization="int8", packs=packs)
    assert plan.weights_bytes < weights_bytes(CONFIG, "f32", packs=packs)


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_weights_of_an_engine_serve_another_one(quantization):
    settings = {"max_num_seqs": 2, "max_model_len": 64, "quantization": quantization}
    first = LLM.from_params(CONFIG, init_params(CONFIG, seed=0), **settings)
    second = LLM.from_params(CONFIG, first.runner.params, **settings)
    outputs = [logprobs(llm.generate([PROMPT], GREEDY)[0]) for llm in (first, second)]
    assert outputs[0] == outputs[1]


def is_codes(x) -> bool:
    return isinstance(x, Int8Matrix)


def logprobs(output) -> list[float]:
    of_prompt = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    (completion,) = output.outputs
    return of_prompt + [
        entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]


def test_shapes_of_codes_need_no_weights():
    shapes = abstract_params(CONFIG, "bf16", "int8")
    w = shapes.layers[0].w_up
    assert (w.codes.dtype, w.scales.dtype, shapes.embed.dtype) == (jnp.int8, jnp.float32, jnp.bfloat16)
    assert w.codes.shape == w.shape == (CONFIG.d_ff, CONFIG.d_model) and w.scales.shape == (CONFIG.d_ff,)


def test_other_quantisations_are_refused():
    with pytest.raises(ConfigError, match="quantization is 'awq', must be one of None, int8"):
        LLM("ksana-tiny", quantization="awq")
