"""A step as one program, which has the fewest launches; see `step_runs` for several programs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ksana_jax.models.transformer import embedded
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.network import Network, step_last, through, unpacked
from ksana_jax.runner.transfer import Packing
from ksana_jax.scheduler.step.types import StepShape


def lower_whole(*arguments: Any, network: Network, shape: StepShape, alike: Sequence[int], packing: Packing) -> Any:
    """Lowers a step as one program: (params, cache, vector, given, patterns) -> (cache, hidden [T, D], hidden [J, D] of
    the sampled tokens, sampling settings).

    Args:
      arguments: of the program, or their shapes. given: tokens [J] that the previous step samples; with the
        embedding on the host, embedding rows of the step's tokens [T, D].
      alike: for each layer the first one with the same pattern in the same group.
      packing: of the vector: StepArrays, without tokens if the embedding is on the host, and sampling settings.
    """
    step = network.jit_donating(step_packed, 4, shape.num_tokens, shape=shape, alike=alike, packing=packing)
    return lower(step, *arguments)


def step_packed(params, cache, vector, given, patterns, *, network: Network, shape, alike, packing: Packing):
    arrays, settings = unpacked(vector, given, packing)
    return *step_whole(params, cache, arrays, patterns, network=network, shape=shape, alike=alike), settings


def step_whole(params, cache, arrays, patterns, *, network: Network, shape, alike):
    angles, layers = network.angles(arrays.positions), range(len(params.layers))
    x = embedded(params, arrays.tokens, arrays.positions, config=network.config, operators=network.operators)
    cache, x = through(
        params.layers,
        cache,
        x,
        functools.cache(arrays.of_group),
        [angles[kind] for kind in network.rope_kinds],
        patterns,
        network.placed(layers),
        network=network,
        shape=shape,
        kinds=layers,
        alike=alike,
    )
    return cache, *step_last(params, x, arrays.sampled, network=network)
