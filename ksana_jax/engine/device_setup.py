"""The device half of an engine: its runner, and the facts about it that the host half needs.

It is prepared without weights, which takes little time, and then loaded. Between the two, processes that divide a model
agree on its size.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.devices.platforms import platform_of, warn_of_unused_gpu
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.scheduler.step.executor import Executor

if TYPE_CHECKING:
    from ksana_jax.runner.planner.engine import PoolPlan
    from ksana_jax.runner.runner import Runner
    from ksana_jax.sharding.placement import Placement

logger = logging.getLogger("ksana_jax")


class DeviceSetup(NamedTuple):
    """The executor of an engine, and the facts about it that the host half needs.

    config: with nothing left open. layout, platform: of the pool. index: of its cached prefixes. plan: of its memory.
    read: `Prepared.weights`; None where something else than a runner computes.
    """

    config: EngineConfig
    layout: KVLayout
    platform: str
    executor: Executor
    index: PrefixIndex
    plan: PoolPlan | None = None
    read: Callable[[Any], tuple[Any, str]] | None = None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A device half without weights and pool.

    Args:
      make_runner: takes the rest of `Runner`'s arguments. trial: a runner that it has made, without weights.
      plan: of the memory of this process's devices.
    """

    model: ModelConfig
    config: EngineConfig
    patterns: Seq[AttentionPattern]
    layout: KVLayout
    placement: Placement
    make_runner: Callable[..., Any]
    trial: Runner
    plan: PoolPlan

    def weights(self, params: Any) -> tuple[Any, str]:
        """Returns weights that are given, or read, on the devices and quantised as set, and their fingerprint, which is
        empty without a prefix cache.

        Args:
          params: weights, or a function that reads them.

        Raises:
          LoadError: files with weights changed while they were read.
        """
        from ksana_jax.engine.fingerprint import digest_of_params, fingerprint
        from ksana_jax.engine.packed_weights import kept_packed
        from ksana_jax.loading.load import WeightReader, embedding_on_host
        from ksana_jax.models.params import owned, quantised

        model, config, layout, placement = self.model, self.config, self.layout, self.placement
        params = params if callable(params) else owned(params, config.tensor_parallel_size)
        placement.connect()
        if isinstance(params, WeightReader):
            params = kept_packed(params, model, config, self.trial)
        caching, weights = config.enable_prefix_caching, None
        if caching and isinstance(params, WeightReader):
            weights, params = params.read_with_digest()
        elif callable(params):
            params = params()
        if caching and weights is None:
            weights = digest_of_params(params)
        if config.embedding_device == "host":
            params = embedding_on_host(params)
        params = quantised(placement.params(model, params, config.embedding_device), config.quantization)
        if weights is None:
            return params, ""
        assert config.max_model_len is not None
        return params, fingerprint(
            model,
            weights,
            dtype=config.dtype,
            quantization=config.quantization,
            kv_dtype=f"{config.kv_dtype} {config.kv_full_precision_layers}"
            + ("" if layout.eviction is None else f" {layout.eviction.method.stored}{', kept' * config.kept_tokens}")
            + ("" if layout.selection is None else f" {layout.selection}"),
            max_model_len=config.max_model_len,
            numerics=config.numerics,
        )

    def load(
        self, params: Any, num_blocks: int, kind: Callable[..., Any], programs: dict[Any, Any] | None = None
    ) -> DeviceSetup:
        """Reads the weights, and creates the runner with its pool.

        Args:
          params: weights, or a function that reads them. num_blocks: of the pool; at most as many as are planned.
          kind: the class `Runner`, or one that has its arguments.
        """
        from ksana_jax.models.params import num_active_params

        model, config, layout, placement, plan = self.model, self.config, self.layout, self.placement, self.plan
        if num_blocks < plan.num_blocks:
            pool_bytes = plan.pool_bytes // plan.num_blocks * num_blocks
            plan = dataclasses.replace(plan, num_blocks=num_blocks, pool_bytes=pool_bytes)
        loads = callable(params)
        params, digest = self.weights(params)
        of_states = layout.state_bytes_of(config.host_cache_bytes, num_blocks)
        runner = self.make_runner(
            kind,
            params=params,
            num_blocks=num_blocks,
            num_host_blocks=(config.host_cache_bytes - of_states) // placement.host_layout(layout).block_bytes,
            num_host_states=of_states // layout.states.slot_bytes if layout.states else 0,
            consume_params=loads,
            programs=programs,
        )
        cost = recompute_cost(model, num_active_params(model), config.block_size)
        index = PrefixIndex(config.block_size, Scope(digest).seen_through(self.patterns), cost=cost)
        config = dataclasses.replace(config, num_blocks=num_blocks)
        warn_of_unused_gpu(platform := platform_of(placement.device))
        return DeviceSetup(config, layout, platform, runner, index, plan, self.weights)


def prepare(
    model: ModelConfig, config: EngineConfig, patterns: Seq[AttentionPattern], placement: Placement | None = None
) -> Prepared:
    """Checks an engine's requirements of its devices, chooses implementations, and plans the memory.

    Args:
      config: completed by `EngineConfig.for_model`.
      placement: on the devices; None takes jax's first ones.

    Raises:
      ConfigError: settings do not fit the devices or the model; the message says which and why.
    """
    # Imported here: an engine around another executor needs no jax.
    from ksana_jax.devices.capabilities import features, stored_as_bits
    from ksana_jax.devices.starting import use_device
    from ksana_jax.engine.verdict import preferred
    from ksana_jax.loading.load import abstract_params, check_embedding_on_host
    from ksana_jax.runner.planner.engine import pool_size
    from ksana_jax.runner.runner import Runner
    from ksana_jax.sharding.placing import place_on

    use_device(config.device)
    if config.embedding_device == "host":
        check_embedding_on_host(model)
    placement = placement or place_on(config.tensor_parallel_size, config.num_processes)
    placement.local_model(model)  # says whether the model can be divided
    layout = make_layout(model, patterns, config, stored_as_bits(placement.device))
    features(placement.device)  # says now what is missing
    config, reason = preferred(model, config, layout)
    if reason is not None:
        logger.info("operators.prefer %s: %s", config.operators.prefer, reason)
    assert config.max_model_len is not None and config.max_repositioned_sinks is not None
    settings = {
        "patterns": patterns,
        "layout": layout,
        "max_model_len": config.max_model_len,
        "max_repositioned_sinks": config.max_repositioned_sinks,
        "embedding_device": config.embedding_device,
        "settings": config.operators,
        "numerics": config.numerics,
        "placement": placement,
    }
    make_runner = functools.partial(_made, model, settings)
    # Without weights and pool it refuses early whatever the full runner would.
    trial = make_runner(Runner, params=abstract_params(model, config.dtype, config.quantization), num_blocks=1)
    if model.kept and trial.products.name != "packed":
        logger.warning(
            "quantization 'stored': operators.linear %r unpacks matrices in every step, which takes longer than "
            'multiplying dequantised ones; "packed" does not',
            trial.products.name,
        )
    operators = dataclasses.replace(config.operators, linear=trial.products.name)
    config = dataclasses.replace(config, operators=operators)
    plan = pool_size(model, config, layout)
    return Prepared(model, config, patterns, layout, placement, make_runner, trial, plan)


def _made(model: ModelConfig, settings: dict[str, Any], kind: Callable[..., Any], **rest: Any) -> Any:
    return kind(model, **settings, **rest)


def recompute_cost(model: ModelConfig, num_params: int, block_size: int) -> Callable[[int], float]:
    """Returns the operations to compute a block at a sequence position, relative to the first block."""
    per_token = 2 * num_params
    per_seen_token = 4 * model.num_layers * model.num_heads * model.head_dim

    def operations(position: int) -> float:
        return per_token + per_seen_token * (position + block_size / 2)

    return lambda position: operations(position) / operations(0)
