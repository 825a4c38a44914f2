"""MLPs of experts against their definition, expert by expert, in steps of any routing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.core.layer_spec import ExpertsSpec, MLPSpec
from ksana_jax.models.experts import MOST_ROWS, block_rows, each_expert, route
from ksana_jax.models.layers import linear
from ksana_jax.models.mlp import MLPS
from ksana_jax.models.params import param_shapes, quantised
from ksana_jax.native.operators import linear as native
from ksana_jax.ops.linear import choose_linear
from tests.machine import native_products
from tests.models.own_kinds import CONFIGS, weights

pytestmark = pytest.mark.usefixtures("quick_compiles")

NUM, K, D, F = 5, 2, 8, 6
SPEC = ExpertsSpec(NUM, K)
rng = np.random.default_rng(0)
STACK = jnp.asarray(rng.standard_normal((NUM, D, D)), jnp.float32)


def applied(rows, chosen, stack=STACK):
    return each_expert(rows, jnp.asarray(chosen), stack, lambda x, w: x @ w, SPEC)


def rows_of(num_tokens: int):
    return jnp.asarray(rng.standard_normal((num_tokens, D)), jnp.float32)


ROUTINGS = {
    "one token": [[3, 1]],
    "each its own": [[t % NUM, (t + 2) % NUM] for t in range(40)],
    "all to two experts": [[4, 0]] * 150,
    "mixed": [list(rng.permutation(NUM)[:K]) for _ in range(96)],
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_each_token_gets_its_experts_and_no_others(name):
    chosen = np.array(ROUTINGS[name], np.int32)
    rows = rows_of(len(chosen))
    expected = np.einsum("td,tkde->tke", rows, np.asarray(STACK)[chosen])
    np.testing.assert_allclose(applied(rows, chosen), expected, rtol=1e-5, atol=1e-5)


def test_experts_without_a_token_and_tokens_without_an_expert_are_not_computed():
    """A step without a real token has no block at all; NaN spreads from any expert that a row is multiplied with."""
    chosen = np.array([[1, 3]] * 9 + [[NUM, NUM]] * 7, np.int32)
    rows = rows_of(16).at[9:].set(jnp.nan)
    found = applied(rows, chosen, STACK.at[jnp.array([0, 2, 4])].set(jnp.nan))
    assert np.isfinite(found[:9]).all()
    calls = []

    def counted(x, w):
        jax.debug.callback(lambda: calls.append(1), ordered=True)
        return x @ w

    each_expert(rows, jnp.full((16, K), NUM), STACK, counted, SPEC)
    jax.effects_barrier()
    assert calls == []
    each_expert(rows, jnp.asarray(chosen), STACK, counted, SPEC)
    jax.effects_barrier()
    assert len(calls) == 2 * -(-9 // block_rows(chosen.size, NUM))


@pytest.mark.parametrize(("num_pairs", "size"), [(1, 1), (5, 1), (10, 2), (20, 4), (32, 8), (10_000, MOST_ROWS)])
def test_blocks_have_about_as_many_rows_as_an_expert_has_tokens(num_pairs, size):
    assert block_rows(num_pairs, NUM) == size


def test_weights_are_a_softmax_over_the_chosen_or_over_all():
    scores = rows_of(7)[:, :NUM]
    chosen, of_chosen = route(scores, SPEC)
    best = -np.sort(-np.asarray(jax.nn.softmax(scores)))[:, :K]
    _, of_all = route(scores, dataclasses.replace(SPEC, normalised=False))
    np.testing.assert_allclose(of_all, best, rtol=1e-6)
    np.testing.assert_allclose(of_chosen, best / best.sum(1, keepdims=True), rtol=1e-6)
    assert chosen.tolist() == np.argsort(-np.asarray(scores))[:, :K].tolist()


def test_of_equal_scores_the_first_experts_are_chosen():
    assert route(jnp.zeros((1, NUM)), SPEC)[0].tolist() == [[0, 1]]


def test_a_config_without_experts_is_refused_by_kinds_that_have_them():
    with pytest.raises(ConfigError, match="mlp 'swiglu_experts' needs experts, this config has none"):
        param_shapes(dataclasses.replace(CONFIGS["experts"], experts=None))
    with pytest.raises(ConfigError, match="num_chosen 3 is above num_experts 2"):
        dataclasses.replace(CONFIGS["experts"], experts=ExpertsSpec(2, 3)).validate()


def test_rows_of_padding_have_no_expert():
    params, spec = weights("experts").layers[0], CONFIGS["experts"].layers[0].mlp
    x = jnp.asarray(rng.standard_normal((4, CONFIGS["experts"].d_model)), jnp.float32)
    real, products = jnp.array([True, False, False, True]), []

    def counted(x, w, *args, **kwargs):
        if w.shape == (spec.d_ff, x.shape[-1]):
            jax.debug.callback(lambda: products.append(len(x)), ordered=True)
        return linear(x, w, *args, **kwargs)

    found = MLPS["swiglu_experts"].apply(x, params, counted, spec, real)
    jax.effects_barrier()
    np.testing.assert_allclose(found[real], MLPS["swiglu_experts"].apply(x, params, linear, spec)[real], atol=1e-6)
    chosen, _ = route(linear(x, params.w_router), SPEC)
    tokens, size = np.bincount(np.asarray(chosen)[[0, 3]].reshape(-1)), block_rows(chosen.size, NUM)
    assert products == [size] * 2 * sum(-(-tokens // size))  # gate and up


def test_a_step_of_an_engine_sends_its_padding_to_no_expert(monkeypatch):
    """A prompt of 3 tokens in a step of 16 rows, and decoding in a step of several rows, compute 2 pairs a token."""
    counts, kind = [], MLPS["swiglu_experts"]

    def apply(x, p, linear, spec, real, grouped):
        jax.debug.callback(lambda n: counts.append(int(n)), real.sum())
        return kind.apply(x, p, linear, spec, real, grouped)

    monkeypatch.setitem(MLPS, "swiglu_experts", kind._replace(apply=apply))
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "query_tile": 16, "block_size": 16, "num_blocks": 8}
    llm = LLM.from_params(CONFIGS["experts"], weights("experts"), max_model_len=32, **settings)
    asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, asked)
    jax.effects_barrier()
    assert counts == [3, 3, 1, 1, 1, 1]  # two layers
    assert llm.memory_plan.weights_bytes == sum(w.nbytes for w in jax.tree.leaves(llm.runner.params))


@native_products
@pytest.mark.parametrize("num_others", [1, 6, 70])
def test_a_row_does_not_depend_on_the_other_rows(num_others):
    """Bit by bit, with products of which that is true."""
    params, config = weights("experts").layers[0], CONFIGS["experts"]
    x = jnp.asarray(rng.standard_normal((1 + num_others, config.d_model)), jnp.float32)
    grouped = choose_linear("cpu", "float32", "native").load().grouped
    for given in (None, grouped):
        apply = jax.jit(
            lambda x, g=given: MLPS["swiglu_experts"].apply(x, params, native, config.layers[0].mlp, None, g)
        )
        np.testing.assert_array_equal(apply(x)[0], apply(x[:1])[0])


@native_products
@pytest.mark.parametrize("name", ["experts", "clamped"])
@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
def test_products_of_all_experts_at_once_give_the_numbers_of_blocks(name, quantization):
    """Bit by bit, for tokens; w8a8 has no such products."""
    params, spec = quantised(weights(name), quantization).layers[0], CONFIGS[name].layers[0].mlp
    of, calls = choose_linear("cpu", "float32", "native").load(), []

    def counted(w):
        calls.append(of.grouped(w))
        return calls[-1]

    x, real = jnp.asarray(rng.standard_normal((19, CONFIGS[name].d_model)), jnp.float32), np.arange(19) % 5 > 0
    apply = MLPS[CONFIGS[name].mlp].apply
    blocks, at_once = (apply(x, params, of.linear, spec, jnp.array(real), g) for g in (None, counted))
    assert len(calls) == 3 and [call is None for call in calls] == [quantization == "w8a8"] * 3
    np.testing.assert_array_equal(np.asarray(blocks)[real], np.asarray(at_once)[real])


def test_experts_of_a_spec_without_them_have_no_shared_mlp():
    shapes = MLPS["swiglu_experts"].shapes(D, MLPSpec("swiglu_experts", F, False, SPEC))
    assert shapes["w_down_experts"] == (NUM, D, F) and "w_gate" not in shapes
