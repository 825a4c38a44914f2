"""A step computed again from the pool that it has left, to record attention weights and hidden states."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ksana_jax.models.transformer import embedded
from ksana_jax.ops import kv_write
from ksana_jax.ops.attention import Attended
from ksana_jax.ops.implementations import PagedAttention
from ksana_jax.ops.weights import attention_weights
from ksana_jax.runner.network import Network, through
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepArrays, StepInput, StepShape


class Recorded(NamedTuple):
    """weights: of `attention_weights`, by place (`KVLayout.places`). hidden: [T, D] after layers, by layer."""

    weights: dict[int, list[list[Any]]]
    hidden: dict[int, Any]


def step_recorder(runner: Runner, layers: Sequence[int]) -> Callable[[StepInput], Recorded]:
    """Returns a function that records some layers of a step; it is called before another step is submitted."""

    @functools.cache
    def program(shape: StepShape):
        return jax.jit(functools.partial(record, network=runner.network, shape=shape, layers=frozenset(layers)))

    def recorded(step: StepInput) -> Recorded:
        arrays, patterns = step.arrays, runner.step_arguments(step.shape)[-1]
        if runner.embeds_on_host:
            arrays = arrays._replace(tokens=runner.params.embed[arrays.tokens])
        return program(step.shape._replace(alone=False))(runner.params, runner.cache, arrays, patterns)

    return recorded


def record(params, cache, arrays: StepArrays, patterns, *, network: Network, shape: StepShape, layers) -> Recorded:
    """Computes a step's layers one after the other with `attention_weights`, and writes nothing."""
    each, found = len(network.places) // len(params.layers), Recorded({}, {})

    def write(q, k, v, cache, context, angles, scale):
        return kv_write.write(q, None, None, cache, context, angles, scale)

    def attend(selection, weights: list, queries, cache, context, work):
        out, parts = attention_weights(queries, cache, context, selection)
        weights.append(parts)
        return Attended(out)

    of_group, angles = functools.cache(arrays.of_group), network.angles(arrays.positions)
    x = embedded(params, arrays.tokens, arrays.positions, config=network.config, operators=network.operators)
    for layer, rope in enumerate(network.rope_kinds):
        weights: list[Any] = []
        reading = PagedAttention(write, functools.partial(attend, network.selections[layer], weights))
        alone = dataclasses.replace(network, attention=reading, selections=(None,) * len(network.selections))
        settings = {"network": alone, "shape": shape, "kinds": (layer,), "alike": range(each)}
        places = network.placed(range(layer, layer + 1))
        cache, x = through(params.layers[layer:][:1], cache, x, of_group, [angles[rope]], patterns, places, **settings)
        if layer in layers:
            found.hidden[layer] = x
            found.weights.update(zip(range(layer * each, (layer + 1) * each), weights, strict=True))
    return found
