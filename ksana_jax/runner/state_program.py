"""Starts the verification of drafts, after which the states of recurrent layers follow the accepted tokens."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.models.params import Params
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.states import advanced
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.network import Network
from ksana_jax.runner.step_runs import ends_of
from ksana_jax.runner.transfer import Fetched
from ksana_jax.runner.verification import VerificationKey, verification_packing, verified
from ksana_jax.sampling.acceptance import num_before
from ksana_jax.scheduler.step.per_token import StateArrays
from ksana_jax.scheduler.step.types import StepInput, StepShape, TileGroup


class StatesKey(NamedTuple):
    """Key of a compiled `advance_states` in the runner.

    part: the tiles of rows. count: J tokens of which is known which are usable; None where their numbers are known.
    """

    part: TileGroup
    count: int | None

    @classmethod
    def of(cls, shape: StepShape, key: VerificationKey) -> StatesKey:
        """Returns the key for a step's shape and the key of its verification."""
        return cls(shape.parts[0], key.count if key.part is None else None)


def lower_states(params: Params, cache: KVCache, *, network: Network, key: StatesKey) -> Any:
    """Lowers `advance_states`."""
    (count, width), config, own = key.part, network.config, params.final_norm.dtype
    assert config.recurrent is not None
    tokens, ints = count * width, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    inputs: Any = {
        name: jax.ShapeDtypeStruct((1, 1, tokens, of_each * network.placement.num_devices), dtype or own)
        for name, ((of_each,), dtype) in config.recurrent.inputs(config.d_model).items()
    }
    states, accepted = StateArrays(ints((4, key.part.num_texts)), ints((2, tokens))), ints((key.count or count,))
    run = network.jit_donating(advance_states, 1, tokens, key=key)
    of_layers = KVCache({}, cache.codec, inputs=(inputs,) * len(config.recurrent.layers))
    return lower(run, params, cache, of_layers, states, accepted)


def advance_states(params, cache, inputs, states, accepted, *, network: Network, key: StatesKey) -> tuple[KVCache]:
    """Writes the states after the accepted tokens of a step.

    Args:
      inputs: has the `KVCache.inputs` after the step. states: its `StateArrays`. accepted: of `verify_runs`.
    """
    if key.count is not None:
        count, width = key.part
        accepted = num_before(accepted[: count * width].reshape(count, width))
    linear = network.operators.linear
    layers, in_place = (params.layers, network.config), network.states_in_place
    return (advanced(cache, inputs, states, accepted, key.part.width, *layers, linear, in_place),)


def verify_step(runner: Any, step: StepInput, inputs: Any, hidden: jax.Array, asked: Any, num_top: int | None) -> Any:
    """Starts the verification of a step's drafts.

    Args:
      inputs: `KVCache.inputs` after the step. hidden: of `verify_tokens`. asked: its settings, two pytrees.

    Returns:
      A function that waits for the tokens, see `verified`.
    """
    params, key, part = runner.params, VerificationKey.of_step(step, num_top), step.shape.parts[0]
    mask = step.mask() if callable(step.mask) else step.mask
    verify, arguments = runner._program(key), (ends_of(params), hidden, *asked, key.drafts_of(step), mask)
    if key.tree:
        runner.cache, report = verify(runner.cache, step.arrays.slots, *arguments)
    else:
        report, accepted = verify(*arguments)
        if (states := step.arrays.states) is not None:
            advance = runner._program(StatesKey.of(step.shape, key))
            of_layers = KVCache({}, runner.cache.codec, inputs=inputs)
            (runner.cache,) = advance(params, runner.cache, of_layers, states, accepted)
    return functools.partial(verified, Fetched(report, verification_packing(key)), part)
