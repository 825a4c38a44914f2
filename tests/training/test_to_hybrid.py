"""A hybrid from grouped queries: heads against loops, gradients against the model's and finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.card import model_card
from experiments.training.optimizer import init_state, loss_fn, make_train_step
from experiments.training.settings import HybridShape, ModelShape, TrainConfig
from experiments.training.to_hybrid import attention_from, to_hybrid
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.models.params import init_params, num_params
from tests.training.test_step import reference_loss

pytestmark = pytest.mark.usefixtures("quick_compiles")

D, H = 32, 8
TEXTS = np.random.default_rng(0).integers(0, 300, (3, 40)).astype(np.int32)
SHAPE = ModelShape(d_model=D, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=H, d_ff=40)
LLAMA = TrainConfig(model=SHAPE, vocab_size=300)


def hybrid(**sizes) -> TrainConfig:
    sizes = {"interval": 2, "num_heads": 2, "key_dim": H, "value_dim": H} | sizes
    return dataclasses.replace(LLAMA, model=dataclasses.replace(SHAPE, hybrid=HybridShape(**sizes)))


@pytest.fixture(scope="module")
def weights():
    """Configs and weights before and after."""
    found, wanted = LLAMA.model_config(), hybrid().model_config()
    params = init_params(found, seed=2, std=0.3)
    norms = iter(np.random.default_rng(1).uniform(0.5, 2, (5, D)).astype(np.float32))
    layers = [dataclasses.replace(p, attn_norm=next(norms), mlp_norm=next(norms)) for p in params.layers]
    params = dataclasses.replace(params, layers=tuple(layers), final_norm=next(norms))
    return found, params, wanted, to_hybrid(params, found, wanted, jnp.asarray(TEXTS), seed=0)


def test_heads_of_a_delta_rule_are_those_of_keys(weights):
    _, params, _, after = weights
    (before, _), (delta, attention) = params.layers, after.layers
    w_q, w_o = (np.asarray(w) for w in (before.w_q, before.w_o))
    for head in range(2):
        rows, pair = slice(head * H, (head + 1) * H), [slice(n * H, (n + 1) * H) for n in (2 * head, 2 * head + 1)]
        np.testing.assert_allclose(delta.w_q[rows], (w_q[pair[0]] + w_q[pair[1]]) / 2, atol=1e-6)
        np.testing.assert_allclose(delta.w_o[:, rows], w_o[:, pair[0]] + w_o[:, pair[1]], atol=1e-6)
    for name in ("w_k", "w_v", "w_gate", "w_up", "w_down"):
        np.testing.assert_array_equal(getattr(delta, name), getattr(before, name))
    decays = jax.nn.softplus(delta.b_decay)
    np.testing.assert_allclose(decays, [0.01, 0.1], rtol=1e-4)
    assert delta.w_out_gate.shape == (2 * H, D) and attention.w_out_gate.shape == (4 * H, D)


def test_attention_keeps_the_mean_size_of_its_queries_and_keys_and_its_result(weights):
    found, params, _, after = weights
    x = np.random.default_rng(3).normal(0, 2, (2, 50, D))
    layer = params.layers[1]
    new = attention_from(layer, found, jnp.asarray(x, jnp.float32))
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + found.norm_eps) * np.asarray(layer.attn_norm, np.float64)
    for norm, w in ((new["q_norm"], layer.w_q), (new["k_norm"], layer.w_k)):
        size = np.sqrt(((normed @ np.asarray(w, np.float64).T) ** 2).mean())
        np.testing.assert_allclose(1 + np.asarray(norm), np.full(H, size), rtol=1e-4)
    result = np.random.default_rng(4).normal(size=(5, 4 * H))
    gated = result / (1 + np.exp(-(x[0, :5] @ np.asarray(new["w_out_gate"]).T)))
    np.testing.assert_allclose(gated @ np.asarray(new["w_o"]).T, result @ np.asarray(layer.w_o).T, atol=1e-6)
    for before, now in zip(params.layers, after.layers, strict=True):
        np.testing.assert_allclose(1 + now.mlp_norm, before.mlp_norm, atol=1e-6)


def test_loss_and_gradients_of_a_hybrid_are_those_of_the_model(weights):
    *_, config, params = weights
    targets = np.roll(TEXTS, -1, axis=1)
    expected, expected_grads = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, TEXTS, targets, config)))(params)
    ours = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, TEXTS, targets, config=config, dtype=jnp.float32)))
    loss, grads = ours(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for mine, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert float(jnp.linalg.norm(mine - theirs)) < 1e-4 * float(jnp.linalg.norm(theirs)) + 1e-7

    def changed(by):
        layer = dataclasses.replace(params.layers[0], b_decay=params.layers[0].b_decay.at[1].add(by))
        return float(ours(dataclasses.replace(params, layers=(layer, *params.layers[1:])))[0])

    slope = (changed(0.05) - changed(-0.05)) / 0.1
    assert float(grads.layers[0].b_decay[1]) == pytest.approx(slope, rel=0.05)


def test_decays_stay_in_float32_whatever_products_are_computed_in():
    config = dataclasses.replace(hybrid(), compute_dtype="bf16", context=64)
    model = config.model_config()
    state = init_state(config, init_params(model, seed=1, std=0.2))
    _, loss = make_train_step(config)(state, TEXTS, np.roll(TEXTS, -1, 1), np.float32(0.0))
    exact = loss_fn(init_params(model, seed=1, std=0.2), TEXTS, np.roll(TEXTS, -1, 1), config=model, dtype=jnp.float32)
    assert float(loss) == pytest.approx(float(exact), rel=0.01)


def test_a_hybrid_of_other_heads_is_one_error(weights):
    found, params, *_ = weights
    with pytest.raises(ConfigError, match=r"value_dim \(2, 4, 8\), must be those of keys: \(2, 8, 8\)"):
        to_hybrid(params, found, hybrid(key_dim=4).model_config(), jnp.asarray(TEXTS), 0)


def test_the_siblings_have_nearly_equal_parameters_and_a_card_that_tells_them_apart():
    config = TrainConfig(model=ModelShape(hybrid=HybridShape()))
    ours, theirs = (num_params(c.model_config()) for c in (config, TrainConfig()))
    assert abs(ours / theirs - 1) < 0.01
    assert isinstance(config.model_config(), ModelConfig)
    card = " ".join(model_card(config, "").split())
    assert "A Qwen3.5 model" in card and "in one of 4 layers 4 query and 2 key/value heads of 64" in card
