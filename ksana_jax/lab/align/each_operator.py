"""Measures each implementation of each operator alone: its time at the shapes of a model, and its error against a
float32 model."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.devices.tuning import tuning
from ksana_jax.engine.verdict import MeasuredOperator
from ksana_jax.lab.align.operators import Calls, apart, run_operators
from ksana_jax.models.joined import separate
from ksana_jax.models.params import weight_fields, weights_of
from ksana_jax.ops.implementations import Implementation
from ksana_jax.ops.packing import can_pack, pack, packed, unpacked
from ksana_jax.ops.table import serving
from ksana_jax.runner.example import step_function
from ksana_jax.runner.runner import Runner
from ksana_jax.sampling.sampler import sample
from ksana_jax.scheduler.step.types import Part, StepShape

# Number of timing turns, and the seconds that each implementation runs in one.
TURNS = 5
SECONDS_OF_TURN = 0.01

# Operator and name of an implementation.
Key = tuple[str, str]
# Computes one call, and returns when the device has ended.
Call = Callable[[], Any]
# XLA's, as steps have them.
Options = dict[str, Any] | None


def measure_operators(
    runner: Runner, steps: Mapping[str, tuple[StepShape, int]], tokens: Sequence[int], exact: Calls | None
) -> tuple[MeasuredOperator, ...]:
    """Measures the implementations that serve an engine.

    Args:
      runner: of the engine; its weights and the layout of its pool are used, the pool is not.
      steps: by name the shape of a step and the tokens of its rows.
      tokens: of a text. exact: the calls of a float32 model's operators on it; None leaves errors out.
    """
    seconds: dict[Key, dict[str, float]] = collections.defaultdict(dict)
    for step, (shape, context) in steps.items():
        for key, call_s in operator_seconds(runner, shape, context).items():
            seconds[key][step] = call_s
    errors = {} if exact is None else operator_errors(runner, tokens, exact)
    return tuple(MeasuredOperator(*key, times, errors.get(key)) for key, times in seconds.items())


def shapes_timed(
    num_rows: int, prompt_tokens: int, context: int, block_size: int
) -> Mapping[str, tuple[StepShape, int]]:
    """Returns the steps that are timed, each with the tokens of its rows: `num_rows` decodes of `context` tokens, and a
    prompt of `prompt_tokens` tokens as one chunk."""

    def of(part: Part, tokens: int) -> tuple[StepShape, int]:
        return StepShape((part,), -(-tokens // block_size), max_sampled=part.count), tokens

    return {"decode": of(Part(num_rows, 1), context), "chunk": of(Part(1, prompt_tokens), prompt_tokens)}


def operator_errors(runner: Runner, tokens: Sequence[int], exact: Calls) -> dict[Key, float]:
    """Returns the error of each implementation that serves, over all calls on a text."""
    found = _serving(runner)
    params, errors = separate(unpacked(runner.params), runner.config), {}
    choices = [found[operator] for operator in ("attention", "linear", "norm")]
    # Each call has the inputs of the float32 model, so that one run shows an implementation of each operator.
    for turn in range(max(map(len, choices))):
        attention, linear, norm = (those[turn % len(those)] for those in choices)
        calls = run_operators(
            runner,
            tokens,
            exact,
            params=packed(params, runner.config) if linear.packs else params,
            operators=linear.operators(norm.normaliser),
            implementation=attention,
        )
        used = {"attention": attention.name, "linear": linear.name, "norm": norm.name}
        own: dict[Key, list[float]] = collections.defaultdict(list)
        for name, out in exact.outputs.items():
            operator = _operator(name)
            own[operator, used[operator]].append(apart(out, calls.outputs[name]))
        errors |= {key: math.sqrt(sum(x * x for x in xs) / len(xs)) for key, xs in own.items()}
    return errors


def _operator(name: str) -> str:
    """Returns the operator of a call, which `align.operators` names by its weights."""
    last = name.partition(" #")[0].rpartition(".")[2]
    return "attention" if last == "attention" else "norm" if last.endswith("norm") else "linear"


def _serving(runner: Runner) -> dict[str, list[Any]]:
    return serving(runner.config, runner.requirements, runner.params.final_norm.dtype.name)


def operator_seconds(runner: Runner, shape: StepShape, context: int) -> dict[Key, float]:
    """Returns the seconds of one call of each implementation that serves, compiled alone and timed by turns;
    for "linear", a call multiplies with all matrices of a layer.

    Args:
      shape: of a step. context: tokens of each of its rows.
    """
    calls = dict(_calls(runner, shape, context))
    counts = {}
    for key, call in calls.items():
        call()
        counts[key] = max(math.ceil(SECONDS_OF_TURN / _seconds(call, 1)), 1)
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for turn in range(TURNS):
        for key in list(calls)[:: 1 if turn % 2 else -1]:
            seconds[key].append(_seconds(calls[key], counts[key]))
    return {key: statistics.median(found) for key, found in seconds.items()}


def _seconds(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _calls(runner: Runner, shape: StepShape, context: int) -> Iterator[tuple[Key, Call]]:
    given, options = _attention_arguments(runner, shape, context), tuning(runner.platform).compiler_options
    serves, config = _serving(runner), runner.config
    for i in serves["attention"]:
        yield from _attention_calls(i, options, given, config.num_heads)
    params, dtype = separate(unpacked(runner.params), config), runner.params.final_norm.dtype
    layer, fields, rng = params.layers[0], weight_fields(), np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    found = [w for name, w in weights_of(layer).items() if (weight := fields[name]) is not None and weight.packs]
    matrices = [w for w in found if getattr(w, "ndim", 2) == 2]
    inputs = {w.shape[1]: drawn(shape.num_tokens, w.shape[1]) for w in matrices}
    for i in serves["linear"]:
        weights = [pack(w) if i.packs and can_pack(w) else w for w in matrices]

        def products(inputs, weights, apply=i.apply):
            return [apply(inputs[w.shape[1]], w) for w in weights]

        yield ("linear", i.name), _waiting(options, products, inputs, weights)
    x = drawn(shape.num_tokens, config.d_model)
    for i in serves["norm"]:
        apply = i.normaliser(config.layers[0].norms)
        yield ("norm", i.name), _waiting(options, apply, x, params.final_norm)
    scores = drawn(shape.max_sampled, config.vocab_size).astype(jnp.float32)
    yield ("sampling", "xla"), _waiting(options, lambda scores: sample(scores, None), scores)


def _waiting(options: Options, function: Callable[..., Any], *arguments: Any) -> Call:
    compiled = jax.jit(function, compiler_options=options)
    return lambda: jax.block_until_ready(compiled(*arguments))


class _Reached(Exception):
    """Attention of the first layer has its arguments; the rest is not computed."""


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
) -> Iterator[tuple[Key, Call]]:
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
