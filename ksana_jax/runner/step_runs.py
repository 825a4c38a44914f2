"""The network of a step as programs of a few layers each.

Where a compiler would compile every layer of one program again, though they are alike
(`devices.tuning.Tuning.layers_of_program`), runs of layers of the same kinds share a program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ksana_jax.core.patterns import PatternArrays
from ksana_jax.models.params import LayerParams, Params
from ksana_jax.models.transformer import embedded
from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.network import Network, step_last, through, unpacked
from ksana_jax.runner.program_key import Lowering
from ksana_jax.runner.transfer import Packing
from ksana_jax.scheduler.step.types import StepShape


def ends_of(params: Params) -> Params:
    """Returns the weights outside layers: programs start sooner with these than with hundreds of arrays."""
    return params.replace(layers=())  # pyright: ignore[reportAttributeAccessIssue]


class _Run(NamedTuple):
    """Layers that follow each other.

    kinds, ropes: of each layer, see `Network`. Runs with the same ones share a program.
    """

    kinds: tuple[int, ...]
    ropes: tuple[int, ...]
    layers: range

    @property
    def program(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Key that runs with the same program share."""
        return self.kinds, self.ropes

    def of(self, params: Params) -> list[LayerParams]:
        return list(params.layers[self.layers.start : self.layers.stop])

    @staticmethod
    def all_of(network: Network) -> list[_Run]:
        """Cuts the layers into runs of one length, that with the fewest calls and layers to compile, in sum.

        A layer that evicts has its own program: where codecs differ between layers, XLA:CPU would copy the pool.
        """
        most = (network.tuning.layers_of_program or 1) if all(method is None for method in network.observers) else 1
        kinds, ropes = network.kinds, network.rope_kinds

        def cut(size: int) -> list[_Run]:
            ends = [*range(size, len(kinds), size), len(kinds)]
            layers = [range(begin, end) for begin, end in zip([0, *ends], ends)]
            return [_Run(kinds[at.start : at.stop], ropes[at.start : at.stop], at) for at in layers]

        def cost(runs: list[_Run]) -> int:
            return len(runs) + sum(len(kinds) for kinds, _ in {run.program for run in runs})

        return min(map(cut, range(min(3, most), most + 1)), key=cost)


def lower_in_runs(
    params: Params,
    cache: KVCache,
    vector: Any,
    given: Any,
    patterns: PatternArrays,
    *,
    network: Network,
    shape: StepShape,
    packing: Packing,
) -> LoweredRuns:
    """Lowers a step as programs that run in sequence and together equal `lower_whole`'s."""
    ends = ends_of(params)
    begin = network.placement.mapped(functools.partial(step_first, network=network, packing=packing))
    x, on_device, angles, _ = jax.eval_shape(begin, ends, vector, given)
    runs = {}
    for run in _Run.all_of(network):
        if run.program not in runs:
            numbers, structure = jax.tree.flatten(network.placed(run.layers))
            settings = {"shape": shape, "kinds": run.kinds, "ropes": run.ropes, "structure": structure}
            step = network.jit_donating(step_layers, 2, shape.num_tokens, **settings)
            turns, places = {rope: angles[rope] for rope in run.ropes}, jax.ShapeDtypeStruct((len(numbers),), np.int32)
            runs[run.program] = lower(step, run.of(params), cache, x, on_device, turns, patterns, places)
    first = lower(network.jit(step_first, packing=packing), ends, vector, given)
    last = lower(network.jit(step_last), ends, x, on_device.sampled)
    return LoweredRuns(network, first, runs, last)


@dataclasses.dataclass(frozen=True)
class LoweredRuns:
    """A step's programs before they are compiled; see `lower_in_runs`. runs: by `_Run.program`."""

    network: Network
    first: Any
    runs: dict[tuple[tuple[int, ...], tuple[int, ...]], Any]
    last: Any

    @property
    def programs(self) -> tuple[Any, ...]:
        """All programs, once each, in the order of `StepInRuns.programs`."""
        return (self.first, *self.runs.values(), self.last)

    @property
    def calls(self) -> tuple[int, ...]:
        """Returns how often a step calls each of `programs`."""
        called = [run.program for run in _Run.all_of(self.network)]
        return (1, *map(called.count, self.runs), 1)

    def compile(self) -> StepInRuns:
        return StepInRuns(self.network, [program.compile() for program in self.programs])


class LoweringInRuns(Lowering):
    """`lower_in_runs` and its arguments."""

    def parts(self, lowered: LoweredRuns) -> Sequence[Any]:
        return lowered.programs

    def assembled(self, programs: Sequence[Callable]) -> StepInRuns:
        return StepInRuns(self.keywords["network"], programs)


class StepInRuns:
    """A compiled step: the embedding, each run of layers by its program, the final norm.

    programs: all of them, once each, in the order of `LoweredRuns.programs`.
    """

    def __init__(self, network: Network, programs: Sequence[Any]):
        self.programs, self._network = tuple(programs), network
        self._first, *self._of_runs, self._last = programs

    @functools.cached_property
    def _runs(self) -> list[tuple[Callable, _Run, Any]]:
        network, runs = self._network, _Run.all_of(self._network)
        by_kind = dict(zip(dict.fromkeys(run.program for run in runs), self._of_runs, strict=True))
        found = []
        for run in runs:
            places = np.array(jax.tree.leaves(network.placed(run.layers)), np.int32)
            found.append((by_kind[run.program], run, network.placement.everywhere(places)))
        return found

    def __call__(self, params: Params, cache: Any, vector: Any, given: Any, patterns: PatternArrays):
        """Runs the step; arguments and results of the program of `lower_whole`."""
        ends = ends_of(params)
        x, arrays, angles, settings = self._first(ends, vector, given)
        inputs: tuple[Any, ...] = ()
        for program, run, places in self._runs:
            cache = cache.replace(inputs=()) if cache.inputs else cache
            turns = {rope: angles[rope] for rope in run.ropes}
            cache, x = program(run.of(params), cache, x, arrays, turns, patterns, places)
            inputs += cache.inputs
        return cache if not inputs else cache.replace(inputs=inputs), *self._last(ends, x, arrays.sampled), settings


def compiled_programs(step: Any) -> tuple[Any, ...]:
    """The programs, each a `jax.stages.Compiled`, of a step compiled in either way, or of anything else."""
    return step.programs if isinstance(step, StepInRuns) else (step,)


def step_first(params, vector, given, *, network: Network, packing: Packing):
    """Embeds the tokens; returns the input of all layers, the arrays and angles of the ropes, and the settings."""
    arrays, settings = unpacked(vector, given, packing)
    x = embedded(params, arrays.tokens, arrays.positions, config=network.config, operators=network.operators)
    return x, arrays._replace(tokens=None), network.angles(arrays.positions), settings


def step_layers(ps, cache, x, arrays, angles, patterns, places, *, network: Network, shape, kinds, ropes, structure):
    """Computes some layers. places: int32 [numbers], the leaves of `Network.placed`, a tree of this structure."""
    places, angles = jax.tree.unflatten(structure, list(places)), [angles[rope] for rope in ropes]
    settings = {"network": network, "shape": shape, "kinds": kinds, "alike": range(len(places))}
    return through(ps, cache, x, arrays.of_group, angles, patterns, places, **settings)
