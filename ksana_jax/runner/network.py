"""The network of a step as functions of arrays. `step_program` compiles it as one program, `step_runs` as several."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.core.patterns import FULL
from ksana_jax.devices.features import Features
from ksana_jax.devices.tuning import Tuning
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.methods.steering import steered
from ksana_jax.models.latents import expansion
from ksana_jax.models.operators import Operators
from ksana_jax.models.rope import Rope
from ksana_jax.models.transformer import final_norm, run_layers, sink_logits
from ksana_jax.ops.by_head import attend_by_head
from ksana_jax.ops.implementations import PagedAttention
from ksana_jax.ops.observation import AttentionObserver
from ksana_jax.ops.paged import PagedLayer, paged_attend
from ksana_jax.ops.states import paged_recur
from ksana_jax.runner.transfer import Packing
from ksana_jax.scheduler.step.types import StepArrays, fed
from ksana_jax.sharding.placement import Placement
from ksana_jax.sharding.specs import BY_HEAD, EVERYWHERE


@dataclasses.dataclass(frozen=True)
class Network:
    """Everything except shapes that determines an engine's compiled steps.

    config: of each device's model. placement: on devices.
    ropes: of each layer.
    places: see `kv.layout.KVLayout.places`; of layers in order.
    residual_places: for each of them the places of exact keys and values next to codes, or empty.
    attention: functions of the chosen implementation. tree_attention: those for steps with trees of drafts.
    observers, selections: for each layer the eviction method and the selection method, None without.
    operators: implementations of products with weights and of norms.
    tuning: of the platform. features: that programs may use on the devices.
    weight_forms: of each layer, the first one whose weights have the same types and shapes.
    states_in_place: see `paged_recur`.
    """

    config: ModelConfig
    ropes: tuple[Rope, ...]
    places: tuple[tuple[int, int], ...]
    residual_places: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    num_repositioned_sinks: int
    attention: PagedAttention
    tree_attention: PagedAttention
    observers: tuple[EvictionMethod | None, ...]
    selections: tuple[SelectionMethod | None, ...]
    operators: Operators
    tuning: Tuning
    placement: Placement
    features: Features
    weight_forms: tuple[int, ...]
    states_in_place: Any = None

    @property
    def kinds(self) -> tuple[int, ...]:
        """Returns for each layer the first one computed alike. Patterns are data and make no difference."""
        specs = [_without_pattern(spec) for spec in self.config.layers]
        # Neither method knows places of single heads, of which there may be several for a layer.
        kinds = list(zip(specs, self.observers, self.selections, self.weight_forms))
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
        few = num_tokens <= self.tuning.few_tokens
        options = self.tuning.few_tokens_options if few else self.tuning.compiler_options
        return self.placement.jit(run, returns=returns, donated=1, options=options)


def pool_and(num_others: int) -> tuple[Any, ...]:
    """Returns the specs of results: a pool, and others that are whole on each device."""
    return (BY_HEAD, *[EVERYWHERE] * num_others)


def _without_pattern(spec: LayerSpec) -> LayerSpec:
    return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, pattern=FULL))


def unpacked(vector: Any, given: Any, packing: Packing) -> tuple[StepArrays, Any]:
    """Returns a step's arrays and its sampling settings, as `choose_tokens` takes them; see `lower_whole`."""
    arrays, settings = packing.unpack(vector)
    return arrays._replace(tokens=given if arrays.tokens is None else fed(arrays.tokens, given, jnp)), settings


def through(ps, cache, x, of_group, angles, patterns, places, *, network: Network, shape, kinds, alike):
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
                pattern=jax.tree.map(operator.itemgetter(layer), patterns),
                sink_logits=sink_logits(p, spec.attention),
                alibi=None if (slopes := spec.attention.alibi) is None else network.operators.of_heads(slopes),
                observer=network.observer(kind, layer),
                at=at,
                batch=of_group(group),
                residual=residual and tuple((at, of_group(group)) for group, at in residual),
                schedule=schedule,
                selection=network.selections[kind],
                expand=expansion(p, spec, network.operators) if shape.alone else None,
            )
        )
    if (slots := layers[0].batch.adapters) is not None:
        from ksana_jax.models.adapted import bound

        ps = [bound(p, slots) for p in ps]
    attention = network.tree_attention if shape.tree else network.attention
    attends = paged_attend if each == 1 else functools.partial(attend_by_head, each)
    attend = attends(layers, shape, network.num_repositioned_sinks, attention, network.features)
    operators = dataclasses.replace(network.operators, real=layers[0].batch.positions >= 0)
    settings: dict[str, Any] = {"specs": [layer.spec for layer in layers[::each]], "operators": operators}
    if layers[0].batch.states is not None:
        settings["recur"] = paged_recur(layers, shape, network.states_in_place)
    if (steering := layers[0].batch.steering) is not None:
        numbers = [layer // each for *_, layer in places[::each]]
        attend, settings["after_layer"] = steered(attend, steering, numbers, operators.of_heads, jnp)
    x, cache = run_layers(ps, x, attend, cache, expands=shape.alone, **settings)
    return cache, x


def step_last(params, x, sampled, *, network: Network):
    hidden = final_norm(params, x, config=network.config, operators=network.operators)
    return hidden, hidden[sampled]
