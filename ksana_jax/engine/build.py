"""Builds an engine from a model, its weights and its settings; only this file joins the parts."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from ksana_jax.core import refusals
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.device_setup import DeviceSetup, prepare
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.settings import check_length, check_policies, with_dtype, with_token_ids
from ksana_jax.kv.disk.tier import BlockFormat, DiskTier
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.model_layout import with_heads_apart
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.prefix_reporter import PrefixReporter
from ksana_jax.kv.state_snapshots import read_state_snapshots
from ksana_jax.loading.config_json import check_tokenizer
from ksana_jax.methods.presets import PatternLike, read_patterns
from ksana_jax.methods.steering import steer
from ksana_jax.scheduler.row_eviction import Measure
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.speculative import draft_lengths, draws_trees, read_speculative
from ksana_jax.scheduler.speculative.base import ProposerContext
from ksana_jax.scheduler.speculative.speculation import Speculation
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.executor import Executor
from ksana_jax.scheduler.step.ladders import make_buckets
from ksana_jax.scheduler.step.per_token import adapter_slots, full_blocks, numbering, states
from ksana_jax.tokenizers import Tokenizer

if TYPE_CHECKING:
    from ksana_jax.engine.distributed.driver import Workers
    from ksana_jax.sharding.placement import Placement

# Called with each new engine; empty except while tracing, see `ksana_jax.lab.trace`.
observers: list[Callable[[Engine], None]] = []
logger = logging.getLogger("ksana_jax")


def build_engine(
    model: ModelConfig,
    params: Any,
    config: EngineConfig,
    *,
    patterns: PatternLike | Seq[PatternLike] | None = None,
    executor: Executor | None = None,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.perf_counter,
    buckets: Buckets | None = None,
    programs: dict[Any, Any] | None = None,
    workers: Workers | None = None,
    placement: Placement | None = None,
    **memory: Any,
) -> Engine:
    """Builds an engine from scheduler, KV memory, batch builder and executor.

    Cheap checks come first, then the pool is sized, which may compile a step, and then the
    weights are read.

    Args:
      params: weights of the model, or a function that reads them; unused where an executor is given.
      config: its open fields are filled in: `EngineConfig.for_model`, and the planner's number of blocks.
      patterns: the layers' attention patterns, in a form that `read_patterns` takes; None takes the model's own.
      executor: computes the steps instead of a `Runner`: a simulator, or a test's fake. It needs
        no jax, and a config with num_blocks.
      tokenizer: makes text; None serves requests with detokenize=False only.
      clock: seconds, rising.
      buckets: shapes of the steps; None takes `make_buckets`.
      programs: compiled functions that runners of equal settings share; see `Runner`.
      workers: the other processes that divide the model, with config.distributed; see `engine.distributed.driver`.
      placement: on the devices; None takes jax's first ones.
      memory: arguments of `KVMemory` that replace those which follow from model and config.

    Raises:
      ValueError: model, settings and tokenizer do not fit together; the message says which and why.
    """
    _check_tokenizer(model, tokenizer)
    seen = read_patterns(patterns, model)
    config = with_dtype(check_policies(config, model), params).for_model(model, seen)
    seen = with_heads_apart(seen, model, read_eviction(config.kv_eviction))
    check_length(model, config)
    config = with_token_ids(config, tokenizer, model.vocab_size)
    if executor is None:
        half = _on_device(model, params, config, seen, programs, workers, placement)
    else:
        layout = make_layout(model, seen, config)
        half = DeviceSetup(config, layout, "cpu", executor, PrefixIndex(config.block_size, Scope().seen_through(seen)))
    method = read_speculative(half.config.speculative_config)
    builder = _builder(half, model, buckets)
    speculation = None
    if method is not None:
        selects = half.layout.selection is not None
        refusals.check({"kv_selection": selects, refusals.BRANCHES: method.draws_trees})
        context = ProposerContext(half.config, model.vocab_size, half.layout, seen, builder.buckets, tokenizer)
        speculation = Speculation(method, method.proposer(context), context)
    engine = Engine(
        _scheduler(half, clock, memory, speculation),
        builder,
        half.executor,
        model=model,
        config=half.config,
        tokenizer=tokenizer,
        memory_plan=half.plan,
        clock=clock,
    )
    engine.read_weights = half.read
    if half.config.enable_prefix_caching and half.config.prefix_report_blocks:
        decode = str if tokenizer is None else functools.partial(tokenizer.decode, skip_special_tokens=False)
        PrefixReporter(engine.memory, half.config.prefix_report_blocks, decode)
    if config.enable_lora:
        from ksana_jax.engine.adapters import Adapters

        engine.factory.adapters = Adapters(model, half.config, half.executor)
    if config.kept_tokens:
        from ksana_jax.engine.kept import KeptTokens

        engine.inspectors.append(KeptTokens(engine))
    for observe in observers:
        observe(engine)
    return engine


def _check_tokenizer(model: ModelConfig, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, Tokenizer):
        kind = type(tokenizer).__name__
        raise ConfigError(f"tokenizer is of type {kind}, must be a path, a ksana_jax Tokenizer or None")
    check_tokenizer(model, tokenizer)


def _on_device(
    model: ModelConfig,
    params: Any,
    config: EngineConfig,
    patterns: Seq[AttentionPattern],
    programs: dict[Any, Any] | None,
    workers: Workers | None,
    placement: Placement | None,
) -> DeviceSetup:
    """Creates a runner on its devices."""
    if config.distributed is not None and workers is None:
        raise ConfigError("distributed: only LLM, with a model's directory, makes an engine of several processes")
    if workers is None:
        prepared = prepare(model, config, patterns, placement)
        return prepared.load(params, prepared.plan.num_blocks, _runner(config), programs)
    return workers.load(
        functools.partial(prepare, model, config, patterns, placement), config, patterns, params, programs
    )


def _runner(config: EngineConfig) -> Callable[..., Any]:
    """Returns the class of the runner. Imported here: an engine around another executor needs no jax."""
    if config.enable_lora:
        from ksana_jax.runner.adapted import AdaptedRunner

        return functools.partial(AdaptedRunner, num_slots=config.max_loras, rank=config.max_lora_rank)
    from ksana_jax.runner.runner import Runner

    return Runner


def _scheduler(
    half: DeviceSetup, clock: Callable[[], float], replaced: dict[str, Any], speculation: Speculation | None
) -> Scheduler:
    """Creates the scheduler with its KV memory. replaced: arguments of KVMemory that override the defaults."""
    config, layout, disks = half.config, half.layout, []
    assert config.num_blocks is not None and config.max_model_len is not None
    if config.disk_cache_dir is not None:
        folder, of_states = os.path.expanduser(config.disk_cache_dir), layout.of_states
        states = layout.state_bytes_of(config.disk_cache_bytes, config.num_blocks)
        for part, num_bytes in ((layout, config.disk_cache_bytes - states), (of_states, states)):
            if part is not None:
                disks.append(DiskTier(folder, BlockFormat.of(part, half.index.scope.model), num_bytes))
    disk, disk_states = (*disks, None, None)[:2]
    settings: dict[str, Any] = {
        "index": half.index,
        "caching": config.enable_prefix_caching,
        "replacement": config.prefix_replacement,
        "preempt": config.preempt,
        "write": config.cache_write,
        "host_data": half.executor.host_blocks,
        "host_states": half.executor.host_states,
        "disk": disk,
        "disk_states": disk_states,
        "clock": clock,
    }
    return Scheduler(
        KVMemory(config.num_blocks, **(settings | replaced)),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        query_tile=config.query_tile,
        max_model_len=config.max_model_len,
        layout=half.layout,
        policy=config.policy,
        speculation=speculation,
        measure=_measurer(half.executor),
        state_snapshots=read_state_snapshots(config.state_snapshots),
    )


def _measurer(executor: Any) -> Measure:
    """Returns what measures rows for `RowEviction`; None of an executor without keys and values."""
    if (evictor := getattr(executor, "evictor", None)) is None:
        return None
    return lambda asked: evictor.measure(executor.cache, asked)


def _builder(half: DeviceSetup, model: ModelConfig, buckets: Buckets | None) -> BatchBuilder:
    config, additions = half.config, numbering(half.layout.numbers_queries)
    assert config.num_blocks is not None and config.max_repositioned_sinks is not None
    speculative = read_speculative(config.speculative_config)
    residual = tuple(g for g, group in enumerate(half.layout.groups) if group.residual)
    if half.layout.sealed is not None:
        additions["full_blocks"] = functools.partial(full_blocks, config.block_size, config.num_blocks)
    if half.layout.states is not None:
        additions["states"] = states
    if config.enable_lora:
        additions["adapters"] = adapter_slots
    return BatchBuilder(
        buckets or make_buckets(config, half.platform, draft_lengths(config), draws_trees(config), model),
        config.block_size,
        config.num_blocks,
        model.vocab_size,
        sink_width=-(-config.max_repositioned_sinks // config.block_size),
        residual_groups=residual if half.layout.sealed is not None else None,
        acceptance="sampled" if speculative is None else speculative.acceptance,
        additions=additions,
        steer=functools.partial(steer, model),
    )
