"""The network of a step, compiled as one program or as one for each kind of run of layers.

One program has the fewest launches, which a GPU wants. Where a compiler would compile every layer of it again, though
they are alike (`devices.tuning.Tuning.layers_of_program`), all runs of as many layers of a kind share a program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.core.patterns import FULL, PatternArrays
from ksana_jax.devices.features import Features
from ksana_jax.devices.tuning import Tuning
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import LayerParams, Params
from ksana_jax.models.rope import Rope
from ksana_jax.models.transformer import embedded, final_norm, run_layers, sink_logits
from ksana_jax.ops.by_head import attend_by_head
from ksana_jax.ops.implementations import Implementation
from ksana_jax.ops.observation import AttentionObserver
from ksana_jax.ops.paged import PagedLayer, paged_attend
from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.packing import Packing
from ksana_jax.scheduler.step.types import StepArrays, StepShape, fed
from ksana_jax.sharding.placement import Placement
from ksana_jax.sharding.specs import BY_HEAD, EVERYWHERE


@dataclasses.dataclass(frozen=True)
class Network:
    """Everything except shapes that determines an engine's compiled steps.

    config: of each device's model. placement: on devices.
    ropes: of each layer.
    places: see `kv.layout.KVLayout.places`; of layers in order.
    residual_places: for each of them the places of exact keys and values beside codes, or empty.
    observers, selections: for each layer the eviction method and the selection method, None without.
    operators: implementations of products with weights and of norms.
    tuning: of the platform. features: that programs may use on the devices.
    """

    config: ModelConfig
    ropes: tuple[Rope, ...]
    places: tuple[tuple[int, int], ...]
    residual_places: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    num_repositioned_sinks: int
    implementation: Implementation
    observers: tuple[EvictionMethod | None, ...]
    selections: tuple[SelectionMethod | None, ...]
    operators: Operators
    tuning: Tuning
    placement: Placement
    features: Features

    @property
    def kinds(self) -> tuple[int, ...]:
        """Returns for each layer the first one computed alike. Patterns are data and make no difference."""
        specs = [_without_pattern(spec) for spec in self.config.layers]
        kinds = list(zip(specs, self.observers, self.selections))  # neither method knows places of single heads
        return tuple(map(kinds.index, kinds))

    def placed(self, layers: range) -> list[tuple[tuple[int, int], Any, int]]:
        """Returns the places of layers, the places of their exact keys and values (or None), and their numbers."""
        each, residual = len(self.places) // len(self.ropes), self.residual_places
        numbers = range(layers.start * each, layers.stop * each)
        return [(self.places[n], residual[n] if residual else None, n) for n in numbers]

    def observer(self, kind: int, layer: Any) -> AttentionObserver | None:
        """Returns the observer of a layer, whose index may be traced."""
        own_kv = self.config.layers[kind].attention.own_kv
        return None if (method := self.observers[kind]) is None else AttentionObserver(method, layer, own_kv)

    @property
    def rope_kinds(self) -> tuple[int, ...]:
        """Returns for each layer the first one with the same rope."""
        ropes = [id(rope) for rope in self.ropes]
        return tuple(map(ropes.index, ropes))

    def angles(self, positions: jax.Array) -> dict[int, tuple[jax.Array, jax.Array]]:
        """Computes the angles of each rope at positions [T], by its kind."""
        return {kind: self.ropes[kind].angles(positions) for kind in dict.fromkeys(self.rope_kinds)}

    def jit(self, function: Any, **static: Any) -> Any:
        """Jits a function of arrays that are whole on each device."""
        return self.placement.jit(
            functools.partial(function, network=self, **static), options=self.tuning.compiler_options
        )

    def jit_donating(self, function: Any, num_results: int, num_tokens: int, **static: Any) -> Any:
        """Jits a function (weights, cache, ...) -> (cache, ...) of a step of num_tokens that donates the cache."""
        run = functools.partial(function, network=self, **static)
        returns = pool_and(num_results - 1)
        return self.placement.jit(run, returns=returns, donated=1, options=self.tuning.options_of(num_tokens))


def pool_and(num_others: int) -> tuple[Any, ...]:
    """Returns the specs of results: a pool, and others that are whole on each device."""
    return (BY_HEAD, *[EVERYWHERE] * num_others)


def _without_pattern(spec: LayerSpec) -> LayerSpec:
    return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, pattern=FULL))


def unpacked(vector: Any, given: Any, packing: Packing) -> tuple[StepArrays, Any]:
    """Returns a step's arrays and its sampling settings, as `choose_tokens` takes them; see `lower_whole`."""
    arrays, settings = packing.unpack(vector)
    return arrays._replace(tokens=given if arrays.tokens is None else fed(arrays.tokens, given, jnp)), settings


def lower_whole(network: Network, shape: StepShape, alike: Sequence[int], packing: Packing, *arguments: Any) -> Any:
    """Lowers a step as one program: (params, cache, vector, given, patterns) -> (cache, hidden [T, D], hidden [J, D] of
    the sampled tokens, sampling settings).

    Args:
      alike: for each layer the first one with the same pattern in the same group.
      packing: of the vector: StepArrays, without tokens if the embedding is on the host, and sampling settings.
      arguments: of the program, or their shapes. given: tokens [J] that the previous step samples; with the
        embedding on the host, embedding rows of the step's tokens [T, D].
    """
    step = network.jit_donating(step_packed, 4, shape.num_tokens, shape=shape, alike=alike, packing=packing)
    return lower(step, *arguments)


class _Run(NamedTuple):
    """Layers of one kind that follow each other. Runs of a kind and length share a program.

    A layer that evicts has its own program: where codecs differ between layers, XLA:CPU would copy the pool.

    kind, rope: of each layer, see `Network`.
    """

    kind: int
    rope: int
    layers: range

    @property
    def program(self) -> tuple[int, int, int]:
        """Key that runs with the same program share."""
        return self.kind, self.rope, len(self.layers)

    def of(self, params: Params) -> list[LayerParams]:
        return list(params.layers[self.layers.start : self.layers.stop])

    @staticmethod
    def all_of(network: Network) -> list[_Run]:
        kinds = list(zip(network.kinds, network.rope_kinds, strict=True))
        most = (network.tuning.layers_of_program or 1) if all(method is None for method in network.observers) else 1
        runs, begin = [], 0
        for end in range(1, len(kinds) + 1):
            if end == len(kinds) or kinds[end] != kinds[begin] or end - begin == most:
                runs.append(_Run(*kinds[begin], range(begin, end)))
                begin = end
        return runs


def lower_in_runs(
    network: Network,
    shape: StepShape,
    packing: Packing,
    params: Params,
    cache: KVCache,
    vector: Any,
    given: Any,
    patterns: PatternArrays,
) -> LoweredRuns:
    """Lowers a step as programs that run in sequence and together equal `lower_whole`'s."""
    ends = params.replace(layers=())  # pyright: ignore[reportAttributeAccessIssue]
    begin = network.placement.mapped(functools.partial(step_first, network=network, packing=packing))
    x, on_device, angles, _ = jax.eval_shape(begin, ends, vector, given)
    runs = {}
    for run in _Run.all_of(network):
        if run.program not in runs:
            places = jax.tree.map(lambda number: jax.ShapeDtypeStruct((), np.int32), network.placed(run.layers))
            step = network.jit_donating(step_layers, 2, shape.num_tokens, shape=shape, kind=run.kind)
            runs[run.program] = lower(step, run.of(params), cache, x, on_device, angles[run.rope], patterns, places)
    first, last = (
        lower(network.jit(step_first, packing=packing), ends, vector, given),
        lower(network.jit(step_last), ends, x, on_device.sampled),
    )
    return LoweredRuns(network, first, runs, last)


@dataclasses.dataclass(frozen=True)
class LoweredRuns:
    """A step's programs before they are compiled; see `lower_in_runs`. runs: by `_Run.program`."""

    network: Network
    first: Any
    runs: dict[tuple[int, int, int], Any]
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
        compiled = {program: lowered.compile() for program, lowered in self.runs.items()}
        return StepInRuns(self.network, self.first.compile(), compiled, self.last.compile())


class StepInRuns:
    """A compiled step: the embedding, each run of layers by its program, the final norm.

    programs: all of them, once each.
    """

    def __init__(self, network: Network, first: Any, runs: dict[tuple[int, int, int], Any], last: Any):
        self.programs = (first, *runs.values(), last)
        self._first, self._last = first, last
        self._runs = [
            (runs[run.program], run, network.placement.everywhere(jax.tree.map(np.int32, network.placed(run.layers))))
            for run in _Run.all_of(network)
        ]

    def __call__(self, params: Params, cache: KVCache, vector: Any, given: Any, patterns: PatternArrays):
        """Runs the step; arguments and results of the program of `lower_whole`."""
        ends = params.replace(layers=())  # pyright: ignore[reportAttributeAccessIssue]
        x, arrays, angles, settings = self._first(ends, vector, given)
        for program, run, places in self._runs:
            cache, x = program(run.of(params), cache, x, arrays, angles[run.rope], patterns, places)
        return cache, *self._last(ends, x, arrays.sampled), settings


def compiled_programs(step: Any) -> tuple[Any, ...]:
    """The programs, each a `jax.stages.Compiled`, of a step compiled in either way, or of anything else."""
    return step.programs if isinstance(step, StepInRuns) else (step,)


def step_packed(params, cache, vector, given, patterns, *, network: Network, shape, alike, packing: Packing):
    arrays, settings = unpacked(vector, given, packing)
    return *step_whole(params, cache, arrays, patterns, network=network, shape=shape, alike=alike), settings


def step_whole(params, cache, arrays, patterns, *, network: Network, shape, alike):
    angles, layers = network.angles(arrays.positions), range(len(params.layers))
    x = embedded(params, arrays.tokens, arrays.positions, config=network.config, operators=network.operators)
    cache, x = _through(
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


def step_first(params, vector, given, *, network: Network, packing: Packing):
    """Embeds the tokens; returns the input of all layers, the arrays and angles of the ropes, and the settings."""
    arrays, settings = unpacked(vector, given, packing)
    x = embedded(params, arrays.tokens, arrays.positions, config=network.config, operators=network.operators)
    return x, arrays._replace(tokens=None), network.angles(arrays.positions), settings


def step_layers(ps, cache, x, arrays, angles, patterns, places, *, network: Network, shape, kind: int):
    """Computes layers of one kind."""
    kinds, angles = [kind for _ in ps], [angles for _ in ps]
    settings = {"network": network, "shape": shape, "kinds": kinds, "alike": range(len(places))}
    return _through(ps, cache, x, arrays.of_group, angles, patterns, places, **settings)


def _through(ps, cache, x, of_group, angles, patterns, places, *, network: Network, shape, kinds, alike):
    """Computes layers from their weights ps, the angles of their ropes, their places and their kinds.

    of_group: `StepArrays.of_group`. alike: for each layer the first one with the same pattern in the same group.
    """
    layers, each = [], len(places) // len(ps)
    for n, schedule, ((group, at), residual, layer) in zip(np.arange(len(places)) // each, alike, places, strict=True):
        p, turns, kind, spec = ps[n], angles[n], kinds[n], network.config.layers[kinds[n]]
        layers.append(
            PagedLayer(
                spec=spec,
                rope=network.ropes[kind],
                angles=turns,
                pattern=patterns.layer(layer),
                sink_logits=sink_logits(p, spec.attention),
                alibi=None if (slopes := spec.attention.alibi) is None else network.operators.of_heads(slopes),
                observer=network.observer(kind, layer),
                at=at,
                batch=of_group(group),
                residual=residual and tuple((at, of_group(group)) for group, at in residual),
                schedule=schedule,
                selection=network.selections[kind],
            )
        )
    if (slots := layers[0].batch.adapters) is not None:
        from ksana_jax.models.adapted import bound

        ps = [bound(p, slots) for p in ps]
    implementation, features = network.implementation.of_step(shape), network.features
    attends = paged_attend if each == 1 else functools.partial(attend_by_head, each)
    attend = attends(layers, shape, network.num_repositioned_sinks, implementation, features)
    operators = dataclasses.replace(network.operators, real=layers[0].batch.positions >= 0)
    x, cache = run_layers(ps, x, attend, cache, specs=[layer.spec for layer in layers[::each]], operators=operators)
    return cache, x


def step_last(params, x, sampled, *, network: Network):
    hidden = final_norm(params, x, config=network.config, operators=network.operators)
    return hidden, hidden[sampled]
