"""The log-probabilities that an engine gives to texts, as a function of the weights that has a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.params import Params
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.runner.example import example_arrays
from ksana_jax.runner.runner import Runner
from ksana_jax.sampling.probabilities import log_softmax
from ksana_jax.scheduler.step.types import StepShape, TileGroup


def logprobs_function(runner: Runner, config: EngineConfig) -> Callable[[Params, jax.Array], jax.Array]:
    """Returns the function of `LLM.logprobs_function`: the engine's step forwards, XLA's dense model backwards."""
    changed = {
        'numerics "fast"': config.numerics != "invariant",
        "quantization": config.quantization,
        "embedding_device": runner.embeds_on_host,
    }
    if found := [name for name, given in changed.items() if given]:
        raise ConfigError(f'logprobs_function needs numerics "invariant" and does not go with {", ".join(found)}')

    def served(params: Params, tokens: jax.Array) -> jax.Array:
        (count, length), size = tokens.shape, runner.layout.block_size
        width = -(-length // size)
        shape = StepShape((TileGroup(count, length),), table_width=width, max_sampled=1)
        _, _, arrays, patterns = runner.step_arguments(shape)
        arrays = example_arrays(arrays, shape, length, size, count * width)._replace(tokens=tokens.reshape(-1))
        packed = runner.products.weights(params, runner.config, runner.network.tuning.joins_matrices)
        _, hidden, _ = runner.pure_step(shape)(packed, make_cache(runner.layout, count * width), arrays, patterns)
        return log_softmax(runner.head(packed, hidden)).reshape(count, length, -1)

    def backward(given, gradient):
        params, tokens = given
        model = dataclasses.replace(runner.config, pattern=runner.patterns)

        def plain(params: Params) -> jax.Array:
            return jax.nn.log_softmax(dense_logits(params, tokens, config=model, max_len=config.max_model_len))

        return *jax.vjp(plain, params)[1](gradient), np.zeros(tokens.shape, jax.dtypes.float0)

    # One program: operation by operation, XLA would round elsewhere.
    program = jax.jit(served)
    logprobs = jax.custom_vjp(program)
    logprobs.defvjp(lambda *given: (program(*given), given), backward)
    return logprobs
