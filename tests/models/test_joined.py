"""Weights that multiply the same input, stacked: the same layer from one matrix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.devices import tuning
from ksana_jax.models.joined import joined, separate
from ksana_jax.models.operators import XLA_OPERATORS
from ksana_jax.models.params import init_params, quantised
from ksana_jax.runner import programs
from tests.native.test_layer import EVERYTHING, PLAIN, weights


def bits(params):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]


@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
@pytest.mark.parametrize("config", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_a_layer_computes_the_same_from_joined_weights(config, quantization):
    params = weights(config, "float32", quantization)
    whole = joined(params, config)
    [p], [one], [spec] = params.layers, whole.layers, config.layers
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, config.d_model)), jnp.float32)

    def layer(p):
        q, k, v = XLA_OPERATORS.queries_keys_values(x, p, spec)
        return q, k, v, XLA_OPERATORS.after_attention(x, q, p, spec)

    assert one.w_q is one.w_k is one.w_up is one.b_gate is None
    # One product sums in the order of several, but XLA may choose another for other sizes.
    for ours, theirs in zip(layer(one), layer(p), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert bits(separate(whole, config)) == bits(params)
    assert jax.tree.structure(separate(whole, config)) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(joined(whole, config)), jax.tree.leaves(whole), strict=True))


def test_shapes_are_joined_like_weights_and_weights_can_be_consumed():
    params = quantised(init_params(PLAIN), "int8")
    shapes = jax.eval_shape(lambda: params)
    made = joined(shapes, PLAIN)
    whole = joined(params, PLAIN, consume=True)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), whole)
    p: Any = params.layers[0]
    assert p.w_q.codes.is_deleted() and p.w_up.scales.is_deleted() and not p.w_o.codes.is_deleted()


def test_an_mlp_that_reads_gate_and_up_by_themselves_keeps_them(monkeypatch):
    from ksana_jax.models.mlp import MLPS

    monkeypatch.setitem(MLPS, "own", MLPS["swiglu"]._replace(takes_joined=False))
    [p] = joined(init_params(PLAIN), dataclasses.replace(PLAIN, mlp="own")).layers
    assert p.w_gate is not None and p.w_gate_up is None and p.w_qkv is not None


def test_matrices_of_which_one_has_a_bias_are_not_joined():
    params = init_params(PLAIN)
    [p] = params.layers
    partly = params.replace(layers=(p.replace(b_up=jnp.ones(PLAIN.d_ff)),))
    [p] = joined(partly, PLAIN).layers
    assert p.w_gate_up is None and p.w_up is not None and p.b_up is not None and p.w_qkv is not None


CONFIG = ModelConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)


PROMPTS: list[Any] = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [9, 8, 7, 6]}]


def test_an_engine_generates_the_same_from_joined_weights(monkeypatch):
    params = init_params(CONFIG, std=0.3)

    def tokens():
        llm = LLM.from_params(CONFIG, params, num_blocks=8, max_model_len=32, operators={"linear": "xla"})
        found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False))
        return llm.runner.params.layers[0], [output.outputs[0].token_ids for output in found]

    given, apart = tokens()
    joins = dataclasses.replace(tuning.tuning("cpu"), joins_matrices=True)
    monkeypatch.setattr(programs, "tuning", lambda platform: joins)
    used, together = tokens()
    assert given.w_qkv is None and used.w_q is None and used.w_qkv is not None and used.w_qkv.shape == (64, 32)
    assert together == apart
