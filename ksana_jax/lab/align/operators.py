"""Finds the operator that starts a difference between two engines: runs their operators on the same inputs.

Both engines run the same tokens as one chunk, as one program. The first records each operator's inputs
and outputs. In the second, each operator gets the recorded input, and the code after it the recorded output: a
difference is that operator's own. A further run of the second, left alone, shows how differences add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.engine.llm import LLM
from ksana_jax.models.joined import separate
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.operators import Operators
from ksana_jax.models.transformer import logits
from ksana_jax.ops.implementations import PagedAttention
from ksana_jax.runner.example import step_function
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepShape, TileGroup


class Calls(NamedTuple):
    """Inputs and outputs of each operator of a network, by the operator's name, in order."""

    inputs: dict[str, tuple[np.ndarray, ...]]
    outputs: dict[str, np.ndarray]


class ComparedOperator(NamedTuple):
    """One operator of two engines, as root mean squares relative to the first one's numbers.

    own: difference of outputs for the same inputs. before: difference of its inputs as made from
    the same numbers by additions, activations, the embedding. total: difference of outputs where nothing is replaced.
    """

    name: str
    own: float
    before: float
    total: float


def compare_operators(a: LLM, b: LLM, tokens: Sequence[int]) -> list[ComparedOperator]:
    """Compares the operators of two engines on one text, in execution order.

    Raises:
      ValueError: the engines do not have the same operators.
    """
    recorded, alone = run_operators(a.runner, tokens), run_operators(b.runner, tokens)
    if list(recorded.outputs) != list(alone.outputs):
        raise ValueError("the two engines do not have the same operators: they run different models")
    forced = run_operators(b.runner, tokens, recorded)
    return [
        ComparedOperator(
            name,
            apart(out, forced.outputs[name]),
            max(map(apart, recorded.inputs[name], forced.inputs[name])),
            apart(out, alone.outputs[name]),
        )
        for name, out in recorded.outputs.items()
    ]


def apart(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the root mean square of the differences between two arrays, relative to the first's."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    scale = float(np.sqrt(np.mean(x * x))) or 1.0
    return float(np.sqrt(np.mean((x - y) ** 2))) / scale


def run_operators(runner: Runner, tokens: Sequence[int], recorded: Calls | None = None) -> Calls:
    """Runs an engine's network on one text; the pool of the engine stays as it is.

    Args:
      recorded: calls of another engine, whose inputs and outputs take the place of its own.
    """
    count, size = len(tokens), runner.layout.block_size
    shape = StepShape((TileGroup(1, count),), -(-count // size), max_sampled=1)
    given, cache, arrays, patterns = step_function(runner, shape, context=count).arguments
    ids = np.asarray(tokens, np.int32)
    arrays = arrays._replace(tokens=runner.params.embed[ids] if runner.embeds_on_host else ids)
    names: list[str] = []

    def run(params, cache, arrays, patterns, recorded):
        probe = _Probe(params, recorded)
        probed = probe.operators(runner.operators)
        step = runner.pure_step(shape, operators=probed, attention=probe.attention(runner.implementation.load()))
        _, hidden, _ = step(params, cache, arrays, patterns)
        logits(params, hidden, config=runner.config, linear=probed.linear)
        names.extend(probe.inputs)  # a dict that jit returns is sorted by its keys
        return list(probe.inputs.values()), list(probe.outputs.values())

    params = separate(given, runner.config)
    inputs, outputs = jax.tree.map(np.asarray, jax.jit(run)(params, cache, arrays, patterns, recorded))
    return Calls(dict(zip(names, inputs, strict=True)), dict(zip(names, outputs, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Apart(Operators):
    """Unfused operators; a packed embedding is looked up as in the engine."""

    given: Operators = dataclasses.field(kw_only=True)

    def embed(self, embedding: Any, tokens: jax.Array) -> jax.Array:
        return self.given.embed(embedding, tokens)


class _Probe:
    """Records the calls of operators while they are traced, and replaces their inputs and outputs by those that another
    engine has recorded, if it is given. Operators are named by their weights."""

    def __init__(self, params: Any, recorded: Calls | None):
        paths, _ = jax.tree.flatten_with_path(params, is_leaf=lambda x: isinstance(x, Matrix))
        self._names = {id(leaf): jax.tree_util.keystr(path, simple=True, separator=".") for path, leaf in paths}
        self._recorded, self._num_attended = recorded, 0
        self.inputs: dict[str, tuple[jax.Array, ...]] = {}
        self.outputs: dict[str, jax.Array] = {}

    def operators(self, given: Operators) -> Operators:
        """Wraps products with weights and norms separately, though an engine may fuse them."""

        def linear(x, w, b=None, *, dtype=None):
            return self._call(w, lambda x: given.linear(x, w, b, dtype=dtype), x)

        def normaliser(spec):
            norm = given.normaliser(spec)
            return lambda x, weight: self._call(weight, lambda x: norm(x, weight), x)

        return _Apart(linear, normaliser, given=given)

    def attention(self, given: PagedAttention) -> PagedAttention:
        """Wraps attention, rotation and write of keys and values included."""

        def write(q, k, v, *others):
            return given.write(*self._enter(f"layers.{self._num_attended}.attention", q, k, v), *others)

        def attend(*arguments):
            found, name = given.attend(*arguments), f"layers.{self._num_attended}.attention"
            self._num_attended += 1
            return found._replace(out=self._leave(name, found.out))

        return given._replace(write=write, attend=attend)

    def _call(self, weight: jax.Array, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        name = self._names.get(id(weight), "operator")
        name = "logits" if name in ("embed", "head") else name
        if name in self.inputs:
            name += f" #{sum(known.startswith(name) for known in self.inputs) + 1}"
        return self._leave(name, function(*self._enter(name, x)))

    def _enter(self, name: str, *inputs: Any) -> tuple[Any, ...]:
        self.inputs[name] = inputs
        if self._recorded is None:
            return inputs
        # A layer without keys and values of its own has None instead of both.
        pairs = zip(self._recorded.inputs[name], inputs, strict=True)
        return tuple(None if x is None else jnp.asarray(r, x.dtype) for r, x in pairs)

    def _leave(self, name: str, out: jax.Array) -> jax.Array:
        self.outputs[name] = out
        return out if self._recorded is None else jnp.asarray(self._recorded.outputs[name], out.dtype)
