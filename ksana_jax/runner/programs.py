"""The model on the device, with its pool and the programs of its steps: lowered, compiled once a key, counted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.operator_settings import AUTO, OperatorSettings
from ksana_jax.core.patterns import AttentionPattern, stack
from ksana_jax.devices.platforms import platform_of
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.layout import KVLayout
from ksana_jax.methods.steering import Steered
from ksana_jax.models.frequencies import layer_ropes
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params
from ksana_jax.ops.implementations import choose
from ksana_jax.ops.invariant import ROW_BY_ROW, check_invariant
from ksana_jax.ops.linear import choose_linear
from ksana_jax.ops.norm import choose_norm, kinds_of
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.recurrent import choose_recurrent
from ksana_jax.ops.requirements import Requirements
from ksana_jax.runner.compiling import compile_all, compiled, sought
from ksana_jax.runner.decode_loop import LoopKey, lower_loop
from ksana_jax.runner.evicting import Evictor
from ksana_jax.runner.movers import BlockMover
from ksana_jax.runner.network import Network, pool_and
from ksana_jax.runner.program_key import Lowering
from ksana_jax.runner.prompt_scores import lower_scores
from ksana_jax.runner.state_program import StatesKey, lower_states
from ksana_jax.runner.step_program import lower_whole, step_whole
from ksana_jax.runner.step_runs import LoweringInRuns, ends_of, lower_in_runs
from ksana_jax.runner.token_programs import OutputHead, lower_choice, settings_packing
from ksana_jax.runner.transfer import Packing
from ksana_jax.runner.verification import VerificationKey, lower_trees, lower_verification
from ksana_jax.scheduler.step.per_token import StateArrays
from ksana_jax.scheduler.step.types import StepArrays, StepShape
from ksana_jax.sharding.placement import ONE_DEVICE, Placement


def array_shapes(shape: StepShape, layout: KVLayout) -> StepArrays:
    """Returns the shapes of the arrays of a step, whose tokens are ids."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    groups, tokens, width = len(layout.groups), shape.num_tokens, shape.table_width
    tables = ints((groups, shape.num_tiles, width))
    of_tokens, by_group, sampled = map(ints, ((tokens,), (groups, tokens), (shape.max_sampled,)))
    arrays = StepArrays(of_tokens, of_tokens, by_group, by_group, tables, tables, sampled)
    if shape.shared_rows:
        shared = ints((groups, shape.num_groups, width))
        arrays = arrays._replace(shared_tables=shared, shared_starts=shared)
    if layout.numbers_queries is not None:
        arrays = arrays._replace(query_numbers=jax.ShapeDtypeStruct((groups, tokens), jnp.float32))
    if layout.sealed is not None:
        arrays = arrays._replace(full_blocks=ints((groups, shape.most_full(layout.block_size))))
    if layout.states is not None:
        arrays = arrays._replace(states=StateArrays(ints((4, shape.num_texts)), ints((2, tokens))))
    if shape.tree:
        arrays = arrays._replace(ancestors=ints((tokens,)))
    return arrays


class _Patterns(NamedTuple):
    """The patterns of all layers: as given, as arrays, and which layers are alike. They change together."""

    patterns: tuple[AttentionPattern, ...]
    alike: tuple[int, ...]
    arrays: Any


class ModelPrograms:
    """The model on the devices of a placement, its KV pool, and the programs of its steps; the base of `Runner`.

    Args:
      params: weights; their shapes (jax.ShapeDtypeStruct) make a runner that compiles, has no pool and runs nothing.
      layout, num_blocks: of the pool; one device's layout.
      max_model_len: longest sequence; some kinds of rope depend on it.
      max_repositioned_sinks: maximum number of repositioned sinks (`AttentionPattern.sink_position`).
      num_host_blocks, num_host_states: blocks, and slots for states of recurrent layers, of host memory.
      embedding_device: "host" looks tokens up in `params.embed`, then a NumPy array, before the step.
      settings: names of implementations of operators; "auto" takes the first that serves.
      consume_params: weights may be deleted once they are packed or joined, see `LinearImplementation.weights`.
      numerics: "invariant" takes operators that compute each row of a step separately; see `ops.invariant`.
      placement: on devices; by default on jax's first one.
      programs: stores compiled functions. Runners of the same model, patterns and arguments may share them.

    Raises:
      ValueError: the implementation is unknown, or it does not serve this model, device, dtype and block size.
      ConfigError: the model has no invariant numerics here.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        patterns: Sequence[AttentionPattern],
        *,
        layout: KVLayout,
        num_blocks: int,
        max_model_len: int,
        max_repositioned_sinks: int,
        num_host_blocks: int = 0,
        num_host_states: int = 0,
        embedding_device: str = "device",
        settings: OperatorSettings = AUTO,
        numerics: str = "fast",
        consume_params: bool = False,
        placement: Placement = ONE_DEVICE,
        programs: dict[Any, Any] | None = None,
    ):
        self.config, self.layout, self.placement = config, layout, placement
        self.platform = platform_of(placement.device)
        self.embeds_on_host, self._tuning = embedding_device == "host", tuning(self.platform)
        dtype, sinks = params.final_norm.dtype.name, max_repositioned_sinks
        self._local, local_layout = placement.local_model(config), placement.local_layout(layout)
        self.requirements = needs = Requirements.of(
            self._local, local_layout, num_repositioned_sinks=sinks, query_dtype=dtype, device=placement.device
        )
        if numerics == "invariant":
            check_invariant(config, needs, dtype)
            settings = dataclasses.replace(settings, attention=ROW_BY_ROW)
        self.implementation = choose(needs, settings.attention)
        given = {"row_by_row": numerics == "invariant", "num_devices": placement.num_devices}
        given |= {"in_blocks": bool(config.kept), "compute_capability": needs.compute_capability}
        self.products = choose_linear(self.platform, dtype, settings.linear, **given)
        norms = choose_norm(self.platform, dtype, kinds_of(config), settings.norm)
        recurrent = (spec := self._local.recurrent) and choose_recurrent(self.platform, dtype, spec, settings.recurrent)
        self.operators: Operators = placement.operators(self.products.operators(norms.load()))
        self.params = self.weights(params, consume=consume_params)
        self.num_repositioned_sinks, self.ropes = max_repositioned_sinks, layer_ropes(config, max_model_len)
        make = functools.partial(placement.pool, layout, num_blocks)
        planned = isinstance(params.final_norm, jax.ShapeDtypeStruct)
        self.cache: KVCache = jax.eval_shape(make) if planned else make()
        staging = "none" if planned else "auto"
        self.mover = BlockMover(layout, num_blocks, num_host_blocks, staging, placement, num_host_states)
        evictor = functools.partial(
            Evictor, layout, num_blocks, -(-max_model_len // layout.block_size), self.ropes, placement
        )
        self.evictor = None if layout.eviction is None else evictor(lambda: self.params)
        places, methods = (layout.places, layout.residual_places), (layout.evicts_from, layout.selects_in)
        self.network = Network(
            self._local,
            self.ropes,
            *places,
            max_repositioned_sinks,
            self.implementation.load(),
            self.implementation.load_for_trees(),
            *methods,
            self.operators,
            self._tuning,
            placement,
            placement.features,
            _forms(self.params),
            recurrent and recurrent.load(),
        )
        self.head = OutputHead(config, self.operators, placement, placement.vocabulary(config))
        self._compiled: dict[Any, Callable] = {} if programs is None else programs
        self._patterns = _Patterns((), (), None)
        self._packings: dict[StepShape, Packing] = {}
        ModelPrograms.set_patterns(self, patterns)  # a subclass's override may need attributes that are not set yet

    def weights(self, params: Params, *, consume: bool) -> Params:
        """Returns weights, or their shapes, in the form that products read; see `LinearImplementation.weights`."""
        params = self.placement.params(self.config, params, "host" if self.embeds_on_host else "device")
        return self.products.weights(params, self.config, self._tuning.joins_matrices, consume=consume)

    @property
    def num_compilations(self) -> int:
        """Number of functions compiled so far."""
        evicting = 0 if self.evictor is None else len(self.evictor.programs)
        return len(self._compiled) + self.mover.num_compilations + evicting

    @property
    def programs(self) -> dict[Any, Any]:
        """Compiled programs: steps by StepShape, loops of them by LoopKey, others by their keys."""
        return dict(self._compiled)

    @property
    def patterns(self) -> tuple[AttentionPattern, ...]:
        """The attention pattern of each layer."""
        return self._patterns.patterns

    def check_patterns(self, patterns: Sequence[AttentionPattern]) -> None:
        """Checks that the compiled steps can serve these patterns.

        Raises:
          ValueError: more sinks are repositioned than the compiled step has room for.
        """
        room = self.num_repositioned_sinks
        for p in patterns:
            if p.num_repositioned_sinks > room:
                raise ValueError(
                    f"the pattern has {p.num_sinks} sinks at {p.sink_position!r} positions, this engine was made for "
                    f"at most {room}; give it max_repositioned_sinks={p.num_sinks}"
                )

    def set_patterns(self, patterns: Sequence[AttentionPattern]) -> None:
        """Changes each layer's visible positions; the numbers are data, so nothing is compiled again, unless other
        layers than before are alike.

        Raises:
          ValueError: see `check_patterns`.
        """
        self.check_patterns(patterns)
        kinds = [(group, pattern) for (group, _), pattern in zip(self.layout.places, patterns, strict=True)]
        alike = tuple(map(kinds.index, kinds))
        changes = self.network.attention.schedule and alike != self._patterns.alike
        self._patterns = _Patterns(tuple(patterns), alike, self.placement.everywhere(stack(patterns)))
        if changes:  # after the patterns: what another thread compiles for older ones is not kept
            self._compiled = {k: f for k, f in self._compiled.items() if not isinstance(k, StepShape | LoopKey)}

    def compile(self, keys: Sequence[Any], workers: int = 1, *, table_width: int = 0, moves: bool = False) -> None:
        """Compiles programs ahead of time; those already compiled cost nothing.

        Args:
          keys: of programs, such as `keys.keys_for` returns. workers: programs compiled at once.
          table_width: largest block table whose rows are evicted from. moves: True if blocks will move.
        """
        compiled = self._compiled  # `set_patterns` may take another meanwhile
        compiled |= compile_all({key: self._lowering(key) for key in keys if key not in compiled}, workers)
        if self.evictor is not None:
            self.evictor.warm_up(min(table_width, self.evictor.table_width))
        if moves:
            self.mover.warm_up()

    def missing(self, keys: Sequence[Any]) -> list[Any]:
        """Takes programs from the store; returns the keys of those that are still to be compiled."""
        found, missing = sought({key: self._lowering(key) for key in keys if key not in self._compiled})
        self._compiled |= found
        return list(missing)

    def lower(self, key: Any) -> Any:
        """Lowers the program of a key, as it will run."""
        return self._lowering(key)()

    def _lowering(self, key: Any) -> Lowering:
        ends, head = ends_of(self.params), self.head
        if isinstance(key, StepShape):
            if not self._tuning.layers_of_program:
                return self._lowering_whole(key)
            step = {"network": self.network, "shape": key, "packing": self._packing_of(key)}
            return LoweringInRuns(lower_in_runs, *self._packed_arguments(key), **step)
        if isinstance(key, LoopKey):
            step = {"network": self.network, "packing": self._packing_of(key.shape), "alike": self._patterns.alike}
            return Lowering(lower_loop, *self._packed_arguments(key.shape), key=key, head=head, **step)
        if isinstance(key, VerificationKey):
            if key.tree:
                groups = len(self.layout.groups)
                return Lowering(lower_trees, ends, self.cache, head=head, num_groups=groups, key=key)
            return Lowering(lower_verification, ends, head=head, key=key)
        if isinstance(key, StatesKey):
            return Lowering(lower_states, self.params, self.cache, network=self.network, key=key)
        kind, size, *rest = key
        if kind == "score":
            return Lowering(lower_scores, ends, head=head, num_tokens=size, num_top=rest[0])
        hidden = jax.ShapeDtypeStruct((size, self.config.d_model), ends.final_norm.dtype)
        settings = dict(zip(("count", "samples", "dense", "masks", "num_top"), rest, strict=True))
        return Lowering(lower_choice, ends, hidden, head=head, **settings)

    def _compile(self, key: Any) -> Callable:
        self._compiled[key] = compiled(key, self._lowering(key))
        return self._compiled[key]

    def lower_step(self, shape: StepShape):
        """Lowers a step as one program without compiling it, for inspection."""
        return self._lowering_whole(shape)()

    def _lowering_whole(self, shape: StepShape) -> Lowering:
        step = {"network": self.network, "alike": self._patterns.alike, "packing": self._packing_of(shape)}
        return Lowering(lower_whole, *self._packed_arguments(shape), shape=shape, **step)

    def pure_step(self, shape: StepShape, **replaced: Any) -> Callable:
        """Returns the network on a step of one shape as a pure function, neither compiled nor donating:
        (params, cache, arrays, patterns) -> (cache, hidden [T, D], those sampled [J, D]). replaced: of `Network`."""
        network = dataclasses.replace(self.network, **replaced)
        step = functools.partial(step_whole, network=network, shape=shape, alike=self._patterns.alike)
        return self.placement.mapped(step, pool_and(2))

    def step_arguments(self, shape: StepShape):
        """Returns the arguments of `pure_step`, or their shapes."""
        arrays = array_shapes(shape, self.layout)
        if shape.steered:
            arrays = arrays._replace(steering=Steered.shapes(shape, self.config, jax.ShapeDtypeStruct))
        if self.embeds_on_host:
            rows = jax.ShapeDtypeStruct((shape.num_tokens, self.config.d_model), self.params.final_norm.dtype)
            arrays = arrays._replace(tokens=rows)
        return self.params, self.cache, arrays, self._patterns.arrays

    def _packing_of(self, shape: StepShape) -> Packing:
        """Returns how the arrays of a step and its sampling settings are packed."""
        if shape not in self._packings:
            _, _, arrays, _ = self.step_arguments(shape)
            if self.embeds_on_host:
                arrays = arrays._replace(tokens=None)
            settings = jax.ShapeDtypeStruct((settings_packing(shape.max_sampled).size,), jnp.int32)
            self._packings[shape] = Packing((arrays, settings))
        return self._packings[shape]

    def _packed_arguments(self, shape: StepShape):
        """Returns the arguments of a step's program, or their shapes."""
        params, cache, arrays, patterns = self.step_arguments(shape)
        given = arrays.tokens if self.embeds_on_host else jax.ShapeDtypeStruct((shape.max_sampled,), jnp.int32)
        return params, cache, jax.ShapeDtypeStruct((self._packing_of(shape).size,), jnp.int32), given, patterns


def _forms(params: Params) -> tuple[int, ...]:
    """Returns for each layer the first one whose weights have the same types and shapes: files of blocks give some
    layers more bits."""
    forms = [(jax.tree.structure(p), [(w.shape, w.dtype) for w in jax.tree.leaves(p)]) for p in params.layers]
    return tuple(map(forms.index, forms))
