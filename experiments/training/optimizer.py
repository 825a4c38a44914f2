"""Loss, optimiser and one compiled training step. Knows batches, no files."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.training.attention import training_attend
from experiments.training.batches import IGNORED
from experiments.training.delta_rule import recur_in_chunks
from experiments.training.linear import linear
from experiments.training.lora import Adapter, merged
from experiments.training.settings import TrainConfig
from ksana_jax.core.config import ModelConfig
from ksana_jax.models.frequencies import make_rope
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params, dtype_of, weight_fields
from ksana_jax.models.transformer import embedded, final_norm, logits, run_layers, sink_logits

COMPUTE_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


class TrainState(NamedTuple):
    """The state that a training step replaces. Weights are float32, regardless of the dtype of products.

    params: all weights, `Params`; an `Adapter` where one is trained.
    """

    params: Any
    opt_state: Any


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW without a learning rate, which is an argument of each step because it may depend on the clock."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2),
        optax.add_decayed_weights(config.weight_decay, mask=_decays if config.lora is None else None),
    )


def _decays(params: Params) -> Any:
    """Returns which weights decay: matrices, not norms, biases and sink logits."""
    decaying = ("normal", "residual")
    of = {name: weight is not None and weight.starts in decaying for name, weight in weight_fields().items()}
    return jax.tree_util.tree_map_with_path(lambda path, _: of[path[-1].name], params)


def init_state(config: TrainConfig, params: Params | Adapter) -> TrainState:
    """Returns the weights with a new optimiser state."""
    return TrainState(params, make_optimizer(config).init(params))  # pyright: ignore[reportArgumentType]


def weights_of(config: TrainConfig, trained: Any, base: Params | None) -> Params:
    """Returns the model's weights: those that are trained, or base with the adapter that is."""
    if config.lora is None:
        return trained
    assert base is not None
    return merged(base, trained, config.lora, config.model_config())


def learning_rate_scale(config: TrainConfig, step: int, elapsed_s: float) -> float:
    """Returns the fraction of the peak learning rate at a step, counted from 0.

    Warm-up, plateau, linear decay to 0 (arXiv:2404.06395, section 4). The decay follows whichever of num_steps and
    budget_s is further along, so that a run limited by time also ends fully decayed.
    """
    warmup = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    done = max(
        step / config.num_steps if config.num_steps else 0.0,
        elapsed_s / config.budget_s if config.budget_s else 0.0,
    )
    if not config.decay_fraction:
        return warmup
    return warmup * min(1.0, max(0.0, (1.0 - done) / config.decay_fraction))


def training_logits(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Computes logits [batch, T, V] in float32 of texts [batch, T] under full attention, in the weights' dtype."""
    length, spec = tokens.shape[-1], config.layers[0].attention
    sinks = [sink_logits(p, layer.attention) for p, layer in zip(params.layers, config.layers, strict=True)]
    rope = make_rope(spec.rope, spec.head_dim, length)
    attend = training_attend(rope, length, sinks, config.kv_layers, scale=spec.scale)
    operators, specs = Operators(linear), config.layers
    x = embedded(params, tokens, config=config, operators=operators)
    x, _ = run_layers(params.layers, x, attend, None, specs=specs, operators=operators, recur=recur_in_chunks)
    return logits(params, final_norm(params, x, config=config, operators=operators), config=config, linear=linear)


def loss_fn(params: Params, inputs, targets, *, config: ModelConfig, dtype) -> jax.Array:
    """Computes the mean cross-entropy in nats over the targets [batch, T] that are not IGNORED."""
    params = jax.tree_util.tree_map_with_path(lambda path, w: w.astype(dtype_of(path[-1].name, dtype)), params)
    scored = targets != IGNORED
    scores = training_logits(params, inputs, config=config)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.where(scored, targets, 0))
    return jnp.sum(losses * scored) / jnp.maximum(jnp.sum(scored), 1)


def make_train_step(config: TrainConfig):
    """Returns a compiled step(state, inputs, targets, learning_rate, base) -> (state, loss), which donates the state.

    base: the weights that an adapter changes; None where all weights are trained.
    """
    optimizer, model, dtype = make_optimizer(config), config.model_config(), COMPUTE_DTYPES[config.compute_dtype]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, inputs, targets, learning_rate, base: Params | None = None):
        def loss_of(trained):
            return loss_fn(weights_of(config, trained, base), inputs, targets, config=model, dtype=dtype)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)  # pyright: ignore[reportArgumentType]
        params = jax.tree.map(lambda w, u: w - learning_rate * u, state.params, updates)
        return TrainState(params, opt_state), loss

    return step
