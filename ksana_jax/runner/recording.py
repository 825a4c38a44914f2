"""A step computed again from the pool that it has left, to record attention weights and hidden states."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
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
    """weights: `ops.weights.Weights` by place (`KVLayout.places`), part of the step and source. hidden: [T, D] after
    layers, by layer."""

    weights: dict[int, list[list[Any]]]
    hidden: dict[int, Any]


class StepRecorder:
    """Records some layers of a runner's steps."""

    def __init__(self, runner: Runner, layers: Sequence[int]):
        self._runner, self._layers = runner, frozenset(layers)
        self._programs: dict[StepShape, Any] = {}

    def __call__(self, step: StepInput) -> Recorded:
        """Records a step; only before another one is submitted."""
        runner, arrays, shape = self._runner, step.arrays, step.shape
        if runner.embeds_on_host:
            arrays = arrays._replace(tokens=runner.params.embed[arrays.tokens])
        if shape not in self._programs:
            given = {"network": runner.network, "shape": shape, "layers": self._layers}
            self._programs[shape] = jax.jit(functools.partial(record, **given))
        return self._programs[shape](runner.params, runner.cache, arrays, runner.step_arguments(shape)[-1])


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
