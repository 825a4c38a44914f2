"""Builds an engine from a model, its weights and its settings: the one place where the parts are joined."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from ksana_jax.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.settings import with_dtype
from ksana_jax.kv.disk.tier import BlockFormat, DiskTier
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.loading.config_json import check_tokenizer
from ksana_jax.pattern_presets import read_patterns
from ksana_jax.patterns import AttentionPattern
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.step.builder import BatchBuilder, Buckets
from ksana_jax.step.contract import Executor
from ksana_jax.tokenizers import Tokenizer


def build_engine(
    model: ModelConfig,
    params: Any,
    config: EngineConfig,
    *,
    patterns: Seq[AttentionPattern] | None = None,
    executor: Executor | None = None,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.perf_counter,
    buckets: Buckets | None = None,
    programs: dict[Any, Any] | None = None,
    **memory: Any,
) -> Engine:
    """Joins scheduler, KV memory, batch builder and executor into an engine.

    Args:
      params: weights of the model; unused where an executor is given.
      config: what it leaves open is filled in: `EngineConfig.for_model`, and the planner's number of blocks.
      patterns: what each layer attends to; None takes the model's own.
      executor: computes the steps in place of a `Runner` on jax's first device: a simulator, or a test's fake. It needs
        no jax, and a config with num_blocks.
      tokenizer: makes text; None serves requests with detokenize=False only.
      clock: seconds, rising.
      buckets: shapes of the steps; None takes `Buckets.of_engine`.
      programs: compiled functions that runners of equal settings share; see `Runner`.
      memory: arguments of `KVMemory` that replace those which follow from model and config.

    Raises:
      ValueError: model, settings and tokenizer do not fit together; the message says which and why.
    """
    _check_tokenizer(model, tokenizer)
    patterns = read_patterns(model.pattern, model.num_layers) if patterns is None else patterns
    config = with_dtype(config, params).for_model(model, patterns)
    layout = kv_layout(model, config, patterns, "cpu" if executor is not None else None)
    if executor is None:
        config, executor, index = _on_device(model, params, config, patterns, layout, programs)
    else:
        index = PrefixIndex(config.block_size, Scope().seen_through(patterns))
    assert config.num_blocks is not None and config.max_model_len is not None and config.max_rotated_sinks is not None
    settings = _memory_settings(config, layout, index, executor.host_blocks, clock)
    scheduler = Scheduler(
        KVMemory(config.num_blocks, **(settings | memory)),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        query_tile=config.query_tile,
        max_model_len=config.max_model_len,
        layout=layout,
        policy=config.policy,
    )
    builder = BatchBuilder(
        buckets or Buckets.of_engine(config, config.max_model_len),
        config.block_size,
        config.num_blocks,
        model.vocab_size,
        sink_width=-(-config.max_rotated_sinks // config.block_size),
    )
    return Engine(scheduler, builder, executor, model=model, config=config, tokenizer=tokenizer, clock=clock)


def _check_tokenizer(model: ModelConfig, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, Tokenizer):
        kind = type(tokenizer).__name__
        raise ConfigError(f"tokenizer is of type {kind}, must be a path, a ksana_jax Tokenizer or None")
    check_tokenizer(model, tokenizer)


def kv_layout(
    model: ModelConfig, config: EngineConfig, patterns: Seq[AttentionPattern], platform: str | None = None
) -> KVLayout:
    """What a KV block of an engine holds.

    Args:
      platform: of the device; None takes that of jax's first one.
    """
    if platform is None:
        import jax

        platform = str(jax.devices()[0].platform)
    return KVLayout.of(model, patterns, dtype=config.dtype, block_size=config.block_size, platform=platform)


def _on_device(
    model: ModelConfig,
    params: Any,
    config: EngineConfig,
    patterns: Seq[AttentionPattern],
    layout: KVLayout,
    programs: dict[Any, Any] | None,
) -> tuple[EngineConfig, Executor, PrefixIndex]:
    """A runner, the config with the number of its blocks, and the index of its cached prefixes."""
    # Imported here: an engine around another executor needs no jax.
    from ksana_jax.engine.fingerprint import fingerprint
    from ksana_jax.loading.load import check_embedding_on_host, embedding_on_host
    from ksana_jax.models.params import num_params
    from ksana_jax.planner.engine import pool_size
    from ksana_jax.runner.runner import Runner

    max_model_len, rotated = config.max_model_len or 0, config.max_rotated_sinks or 0
    if config.embedding_device == "host":
        check_embedding_on_host(model)
        params = embedding_on_host(params)
    if config.num_blocks is None:
        plan = pool_size(model, config, layout, max_model_len=max_model_len, max_rotated_sinks=rotated)
        config = dataclasses.replace(config, num_blocks=plan.num_blocks)
    assert config.num_blocks is not None
    runner = Runner(
        model,
        params,
        patterns,
        layout=layout,
        num_blocks=config.num_blocks,
        max_model_len=max_model_len,
        max_rotated_sinks=rotated,
        num_host_blocks=config.host_cache_bytes // layout.block_bytes,
        embedding_device=config.embedding_device,
        attention=config.attention_implementation,
        programs=programs,
    )
    digest = ""
    if config.enable_prefix_caching:
        digest = fingerprint(model, params, dtype=config.dtype, max_model_len=max_model_len)
    cost = recompute_cost(model, num_params(model), config.block_size)
    return config, runner, PrefixIndex(config.block_size, Scope(digest).seen_through(patterns), cost=cost)


def _memory_settings(
    config: EngineConfig,
    layout: KVLayout,
    index: PrefixIndex,
    host_blocks: np.ndarray | None,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Arguments of `KVMemory`."""
    disk = None
    if config.disk_cache_dir is not None:
        disk = DiskTier(config.disk_cache_dir, BlockFormat.of(layout, index.scope.model), config.disk_cache_bytes)
    return {
        "index": index,
        "caching": config.enable_prefix_caching,
        "replacement": config.prefix_replacement,
        "preempt": config.preempt,
        "write": config.cache_write,
        "host_data": host_blocks,
        "disk": disk,
        "clock": clock,
    }


def recompute_cost(model: ModelConfig, num_params: int, block_size: int) -> Callable[[int], float]:
    """Operations to compute a block at a text position, relative to the first block: attention grows with the text."""
    per_token = 2 * num_params
    per_seen_token = 4 * model.num_layers * model.num_heads * model.head_dim

    def operations(position: int) -> float:
        return per_token + per_seen_token * (position + block_size / 2)

    return lambda position: operations(position) / operations(0)
