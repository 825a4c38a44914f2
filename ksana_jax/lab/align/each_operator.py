"""What each implementation of each operator shows by itself: its time, and its error against a float32 model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ksana_jax.engine.verdict import MeasuredOperator
from ksana_jax.lab.align.operator_times import operator_times
from ksana_jax.lab.align.operators import Calls, apart, run_operators
from ksana_jax.models.joined import separate
from ksana_jax.ops.implementations import implementations
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
from ksana_jax.ops.norm import NORM_IMPLEMENTATIONS, kinds_of
from ksana_jax.ops.packing import packed, unpacked
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepShape


def measure_operators(
    runner: Runner, steps: Mapping[str, tuple[StepShape, int]], tokens: Sequence[int], exact: Calls | None
) -> tuple[MeasuredOperator, ...]:
    """Measures the implementations that serve an engine.

    Args:
      steps: by name the shape of a step and the tokens of its rows.
      tokens: of a text. exact: the calls of a float32 model's operators on it; None leaves errors out.
    """
    seconds: dict[tuple[str, str], dict[str, float]] = {}
    for step, (shape, context) in steps.items():
        for found in operator_times(runner, shape, context):
            seconds.setdefault((found.operator, found.name), {})[step] = found.seconds
    errors = {} if exact is None else operator_errors(runner, tokens, exact)
    return tuple(MeasuredOperator(*key, times, errors.get(key)) for key, times in seconds.items())


def operator_errors(runner: Runner, tokens: Sequence[int], exact: Calls) -> dict[tuple[str, str], float]:
    """Returns the error of each implementation that serves, by operator and name, over all calls on a text."""
    dtype, kinds = runner.params.final_norm.dtype.name, kinds_of(runner.config)
    attention = [i for i in implementations() if i.unsupported(runner.requirements) is None]
    capability = runner.requirements.compute_capability
    linear = [i for i in LINEAR_IMPLEMENTATIONS if i.why_not(runner.platform, dtype, capability) is None]
    norms = [i for i in NORM_IMPLEMENTATIONS if i.unsupported(runner.platform, dtype, kinds) is None]
    params, found = separate(unpacked(runner.params), runner.config), {}
    # Each call has the inputs of the float32 model, so that one run shows an implementation of each operator.
    count = max(map(len, (attention, linear, norms)))
    for a, b, c in itertools.islice(zip(*map(itertools.cycle, (attention, linear, norms)), strict=False), count):
        calls = run_operators(
            runner,
            tokens,
            exact,
            params=packed(params, runner.config) if b.packs else params,
            operators=b.operators(c.normaliser),
            implementation=a,
        )
        own: dict[tuple[str, str], list[float]] = {}
        for name, out in exact.outputs.items():
            operator = _operator(name)
            own.setdefault((operator, {"attention": a, "linear": b, "norm": c}[operator].name), []).append(
                apart(out, calls.outputs[name])
            )
        found |= {key: math.sqrt(sum(x * x for x in xs) / len(xs)) for key, xs in own.items()}
    return found


def _operator(name: str) -> str:
    """Returns the operator of a call, which `align.operators` names by its weights."""
    last = name.partition(" #")[0].rpartition(".")[2]
    return "attention" if last == "attention" else "norm" if last.endswith("norm") else "linear"
