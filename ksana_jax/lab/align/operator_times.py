"""How long each implementation of each operator takes by itself, at the shapes of a model."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.devices.tuning import tuning
from ksana_jax.models.joined import separate
from ksana_jax.models.params import weight_fields, weights_of
from ksana_jax.ops.implementations import Implementation, implementations
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
from ksana_jax.ops.norm import NORM_IMPLEMENTATIONS, kinds_of
from ksana_jax.ops.packing import can_pack, pack, unpacked
from ksana_jax.runner.example import step_function
from ksana_jax.runner.runner import Runner
from ksana_jax.sampling.sampler import sample
from ksana_jax.scheduler.step.types import Part, StepShape

# Calls are timed in so many turns, in each of which all implementations run for about so long.
TURNS = 5
SECONDS_OF_TURN = 0.01

# Computes one call, and returns when the device has ended.
Call = Callable[[], Any]
# Of XLA, as steps have them.
Options = dict[str, Any] | None


class Timed(NamedTuple):
    """The time of one call, seconds: of the matrices of one layer for "linear"."""

    operator: str
    name: str
    seconds: float


def operator_times(runner: Runner, shape: StepShape, context: int) -> list[Timed]:
    """Times the implementations that serve an engine, each compiled by itself, by turns.

    Args:
      runner: of the engine; its weights and the layout of its pool are used, the pool is not.
      shape: of a step. context: tokens of each of its rows.
    """
    calls = dict(_calls(runner, shape, context))
    counts = {}
    for key, call in calls.items():
        call()
        counts[key] = max(math.ceil(SECONDS_OF_TURN / _seconds(call, 1)), 1)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for turn in range(TURNS):
        for key in list(calls)[:: 1 if turn % 2 else -1]:
            seconds[key].append(_seconds(calls[key], counts[key]))
    return [Timed(*key, statistics.median(found)) for key, found in seconds.items()]


def _seconds(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _calls(runner: Runner, shape: StepShape, context: int) -> Iterator[tuple[tuple[str, str], Call]]:
    given, options = _attention_arguments(runner, shape, context), tuning(runner.platform).compiler_options
    for i in implementations():
        if i.unsupported(runner.requirements) is None:
            yield from _attention_calls(i, options, given, runner.config.num_heads)
    params, dtype = separate(unpacked(runner.params), runner.config), runner.params.final_norm.dtype
    layer, platform, rng = params.layers[0], runner.platform, np.random.default_rng(0)
    fields = weight_fields()

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    found = [w for name, w in weights_of(layer).items() if (weight := fields[name]) is not None and weight.packs]
    matrices = [w for w in found if getattr(w, "ndim", 2) == 2]
    inputs = {w.shape[1]: drawn(shape.num_tokens, w.shape[1]) for w in matrices}
    for i in LINEAR_IMPLEMENTATIONS:
        if i.why_not(platform, dtype.name, runner.requirements.compute_capability) is None:
            weights = [pack(w) if i.packs and can_pack(w) else w for w in matrices]

            def products(inputs, weights, apply=i.apply):
                return [apply(inputs[w.shape[1]], w) for w in weights]

            yield ("linear", i.name), _waiting(options, products, inputs, weights)
    for i in NORM_IMPLEMENTATIONS:
        if i.unsupported(platform, dtype.name, kinds_of(runner.config)) is None:
            apply = i.normaliser(runner.config.layers[0].norms)
            yield (
                ("norm", i.name),
                _waiting(options, apply, drawn(shape.num_tokens, runner.config.d_model), params.final_norm),
            )
    scores = drawn(shape.max_sampled, runner.config.vocab_size).astype(jnp.float32)
    yield ("sampling", "xla"), _waiting(options, lambda scores: sample(scores, None), scores)


def _waiting(options: Options, function: Callable[..., Any], *arguments: Any) -> Call:
    compiled = jax.jit(function, compiler_options=options)
    return lambda: jax.block_until_ready(compiled(*arguments))


class _Reached(Exception):
    """Attention of the first layer has its arguments; no more need be computed."""


def _attention_arguments(runner: Runner, shape: StepShape, context: int) -> tuple[Any, ...]:
    """Returns the arguments of `Implementation.write` in the first layer of a step, with an empty pool that has no more
    than the blocks of its rows."""
    num_blocks = shape.num_tiles * -(-context // runner.layout.block_size)
    example = step_function(runner, shape, context)
    params, _, arrays, patterns = example.arguments
    arrays = jax.tree.map(jnp.asarray, arrays)
    arrays = arrays._replace(block_tables=arrays.block_tables % num_blocks)
    cache = runner.placement.pool(runner.layout, num_blocks)
    found: list[Any] = []

    def write(*arguments: Any) -> Any:
        found.extend(arguments)
        raise _Reached

    probe = runner.implementation._replace(write=write, schedule=None)
    try:
        runner.pure_step(shape, implementation=probe)(params, cache, arrays, patterns)
    except _Reached:
        pass
    return tuple(found)


def _attention_calls(
    implementation: Implementation, options: Options, given: tuple[Any, ...], num_heads: int
) -> Iterator[tuple[tuple[str, str], Call]]:
    q, k, v, cache, context, turns, scale = given
    arrays = context.batch, context.pattern, turns

    def of(arrays: Any) -> Any:
        return context._replace(batch=arrays[0], pattern=arrays[1])

    def write(q, k, v, cache, arrays):
        return implementation.write(q, k, v, cache, of(arrays), arrays[2], scale)

    def attend(queries, cache, arrays):
        schedule = implementation.schedule
        plan = schedule(of(arrays), cache, num_heads) if schedule else None
        return implementation.attend(queries, cache, of(arrays), plan).out

    compiled = jax.jit(write, donate_argnums=3, compiler_options=options)
    state = compiled(q, k, v, jax.tree.map(jnp.copy, cache), arrays)

    def written() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(q, k, v, state[1], arrays))

    yield ("kv_write", implementation.name), written
    attended = jax.jit(attend, compiler_options=options)
    yield ("attention", implementation.name), lambda: jax.block_until_ready(attended(*state, arrays))


def shapes_timed(
    num_rows: int, prompt_tokens: int, context: int, block_size: int
) -> Mapping[str, tuple[StepShape, int]]:
    """Returns the steps that are timed, each with the tokens of its rows: `num_rows` decodes of `context` tokens, and a
    prompt of `prompt_tokens` tokens as one chunk."""

    def of(part: Part, tokens: int) -> tuple[StepShape, int]:
        return StepShape((part,), -(-tokens // block_size), max_sampled=part.count), tokens

    return {"decode": of(Part(num_rows, 1), context), "chunk": of(Part(1, prompt_tokens), prompt_tokens)}
