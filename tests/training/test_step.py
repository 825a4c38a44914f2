"""One training step: the same numbers as the plain model, gradients included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.training.batches import IGNORED
from experiments.training.optimizer import init_state, learning_rate_scale, loss_fn, make_train_step, training_logits
from experiments.training.settings import ModelShape, TrainConfig
from experiments.training.sink_measures import EPSILON
from experiments.training.sinks import evaluate, resting_attention
from experiments.training.start import first_params
from ksana_jax.core.config import ModelConfig
from ksana_jax.models.dense import attention_weights, dense_logits
from ksana_jax.models.params import init_params
from tests.soak import soak_unless

pytestmark = pytest.mark.usefixtures("quick_compiles")

SHAPE = ModelConfig(
    vocab_size=300,
    d_model=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=80,
    tie_embeddings=True,
    max_position=136,
)

LOGITS = (training_logits, dense_logits)


@pytest.fixture(scope="module")
def params():
    return init_params(SHAPE, seed=1, std=0.2)


def with_sinks(kind):
    """The model with sink logits: config and params; learned ones differ from head to head."""
    config = dataclasses.replace(SHAPE, sinks=kind)
    params = init_params(config, seed=1, std=0.2)
    if kind == "learned":
        layer = params.layers[0].replace(sink_logits=jnp.asarray([-1.0, 0.5, 2.0, 3.0]))
        params = params.replace(layers=(layer,))
    return config, params


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, 300, (2, 3, 136))
    targets[1, 100:] = IGNORED
    return inputs.astype(np.int32), targets.astype(np.int32)


@pytest.fixture(scope="module")
def reference(params, batch):
    """Loss and gradients of the plain model."""
    return jax.jit(jax.value_and_grad(reference_loss))(params, *batch)


def reference_loss(params, inputs, targets, config=SHAPE):
    scores = dense_logits(params, inputs, config=config)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(targets, 0))
    return jnp.sum(losses * (targets != IGNORED)) / jnp.sum(targets != IGNORED)


def test_training_logits_are_those_of_the_model(params, batch):
    ours, theirs = (jax.jit(f, static_argnames="config")(params, batch[0], config=SHAPE) for f in LOGITS)
    # Both are float32; sums run in another order.
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-4), (jnp.bfloat16, 0.06)])
def test_loss_and_gradients_are_those_of_the_model(params, batch, reference, dtype, tolerance):
    expected, expected_grads = reference
    loss, grads = jax.jit(jax.value_and_grad(lambda params: loss_fn(params, *batch, config=SHAPE, dtype=dtype)))(params)
    assert abs(float(loss - expected)) < tolerance * float(expected)
    # Relative to each tensor's norm: float32 differs by the order of sums, bfloat16 by its 8 bits through the network.
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        difference = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
        assert difference < tolerance, f"{jax.tree_util.keystr(path)}: {difference}"


@pytest.mark.parametrize("kind", soak_unless(lambda kind: kind == "learned", ["learned", "zero"]))
def test_loss_and_gradients_with_sink_logits_are_those_of_the_model(batch, reference, kind):
    config, params = with_sinks(kind)
    expected, expected_grads = jax.jit(jax.value_and_grad(functools.partial(reference_loss, config=config)))(
        params, *batch
    )
    assert abs(float(expected - reference[0])) > 1e-3, "the logits make a difference"
    step = jax.jit(jax.value_and_grad(functools.partial(loss_fn, config=config, dtype=jnp.float32)))
    loss, grads = step(params, *batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        difference = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
        assert difference < 1e-4, f"{jax.tree_util.keystr(path)}: {difference}"
    assert (grads.layers[0].sink_logits is None) == (kind == "zero")


@pytest.mark.parametrize("kv_layers", [(0, 0, 0), (0, 1, 0)])
def test_loss_and_gradients_of_shared_keys_and_values_are_those_of_the_model(batch, kv_layers):
    config = dataclasses.replace(SHAPE, num_layers=3, kv_layers=kv_layers)
    params = init_params(config, seed=1, std=0.2)
    expected, expected_grads = jax.jit(jax.value_and_grad(functools.partial(reference_loss, config=config)))(
        params, *batch
    )
    loss, grads = jax.jit(jax.value_and_grad(functools.partial(loss_fn, config=config, dtype=jnp.float32)))(
        params, *batch
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        difference = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
        assert difference < 1e-4, f"{jax.tree_util.keystr(path)}: {difference}"


def test_weight_decay_shrinks_matrices_only():
    config = TrainConfig(
        model=ModelShape(d_model=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, d_ff=64),
        vocab_size=300,
        context=64,
        compute_dtype="f32",
        weight_decay=0.5,
    )
    inputs = np.zeros((2, 64), np.int32)
    nothing_scored = np.full((2, 64), IGNORED, np.int32)
    before = init_state(config, first_params(config))
    norm, matrix = np.array(before.params.final_norm), np.array(before.params.layers[0].w_q)
    after, loss = make_train_step(config)(before, inputs, nothing_scored, np.float32(0.1))
    assert loss == 0
    np.testing.assert_array_equal(after.params.final_norm, norm)
    np.testing.assert_allclose(after.params.layers[0].w_q, matrix * (1 - 0.1 * 0.5), rtol=1e-6)


def test_rate_warms_up_stays_and_decays_with_steps_or_time():
    config = TrainConfig(warmup_steps=10, decay_fraction=0.2, num_steps=100, budget_s=50.0)
    assert learning_rate_scale(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate_scale(config, 9, 0.0) == 1
    assert learning_rate_scale(config, 80, 0.0) == pytest.approx(1)
    assert learning_rate_scale(config, 90, 0.0) == pytest.approx(0.5)
    assert learning_rate_scale(config, 20, 45.0) == pytest.approx(0.5), "the clock is further along"
    assert learning_rate_scale(config, 100, 60.0) == 0


def test_sink_metric_counts_heads_that_rest_on_the_first_token(params, batch, reference):
    inputs, targets = batch
    weights = np.asarray(jax.jit(attention_weights, static_argnames="config")(params, inputs[:, :64], config=SHAPE))
    received = weights[..., 0].mean(axis=-1)  # [L, batch, N]
    first, given_up = jax.jit(resting_attention, static_argnames="config")(params, inputs[:, :64], config=SHAPE)
    np.testing.assert_allclose(first, received, atol=1e-6)
    np.testing.assert_allclose(given_up, 0, atol=1e-6)
    measured = evaluate(params, inputs, targets, config=SHAPE, batch_size=2)
    assert measured["sink_1"] == pytest.approx(np.mean(received > EPSILON), abs=1e-4)
    assert measured["heldout_loss"] == pytest.approx(float(reference[0]), rel=1e-4)

    config = dataclasses.replace(SHAPE, sinks="zero")
    zeros = init_params(config, std=0.0)  # query i pays 1 / (i + 2) to each position and to the sink logit
    measured = evaluate(zeros, inputs, targets, config=config, batch_size=2)
    assert measured["first_token_attention"] == measured["sink_logit_attention"] == [0.0587]

    even = init_params(SHAPE, std=0.0)  # all scores are equal: query i pays 1 / (i + 1) to position 0
    assert evaluate(even, inputs, targets, config=SHAPE, batch_size=2)["first_token_attention"] == [0.0741]
