"""Turns keywords of `LLM` into a configuration, and checks what the configuration cannot check itself. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.core import refusals, vllm_names
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.dtypes import canonical_dtype
from ksana_jax.kv.codecs.registry import check_kv_dtype
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.checking import check_priority
from ksana_jax.kv.replacement import find_replacement_policy
from ksana_jax.kv.selection import read_selection
from ksana_jax.kv.state_snapshots import read_state_snapshots
from ksana_jax.scheduler.policies import find_scheduling_policy
from ksana_jax.scheduler.speculative import read_speculative
from ksana_jax.scheduler.speculative.base import SpeculativeMethod


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Returns the configuration for keywords of `LLM`, including vLLM's.

    Raises:
      ConfigError: a keyword is unknown, with the nearest one, or a value cannot be.
    """
    own = ("pattern", "load_format", "tokenizer", "revision", "gguf_file")
    known = {*own, *(f.name for f in dataclasses.fields(EngineConfig))}
    return EngineConfig(**vllm_names.translated(settings, known))


def with_dtype(config: EngineConfig, params: Any) -> EngineConfig:
    """Returns a configuration with dtype "auto" replaced by the weights' dtype.

    Raises:
      ConfigError: there are no weights to take it from.
    """
    if config.dtype != "auto":
        return config
    if params is None or callable(params):
        raise ConfigError('dtype is "auto", and there are no weights to take it from')
    return dataclasses.replace(config, dtype=canonical_dtype(params.final_norm.dtype))


def with_token_ids(config: EngineConfig, tokenizer: Any, vocab_size: int) -> EngineConfig:
    """Returns a configuration whose eviction method has token ids instead of texts.

    Raises:
      ConfigError: it has a text and there is no tokenizer, or the model has no such ids.
    """
    if (method := read_eviction(config.kv_eviction)) is None or not method.probes:
        return config
    method = method.encoded(tokenizer)
    ids = method.probe(np.zeros(1, np.int32))
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(f"kv_eviction probes with token id {int(ids.max())}, ids go from 0 to {vocab_size - 1}")
    return dataclasses.replace(config, kv_eviction=method.setting)


def beyond_training(model: ModelConfig, max_model_len: int) -> str | None:
    """Returns the warning if texts may be longer than those that a model was trained for, or its YaRN reaches."""
    ropes = [layer.attention.rope for layer in model.layers]
    reach = max((int(rope.factor * (rope.original_max_len or 0)) for rope in ropes if rope.kind == "yarn"), default=0)
    # The last token of a sequence is sampled and never computed.
    if max_model_len - 1 <= max(model.max_position, reach):
        return None
    stretched = f", which its YaRN rope stretches to {reach:,}" if reach > model.max_position else ""
    warning = f"max_model_len is {max_model_len:,}, the model was trained for {model.max_position:,} positions"
    warning += f"{stretched}: "
    if any(rope.kind == "dynamic" for rope in ropes):
        return warning + (
            "with its dynamic NTK rope, all texts, short ones too, have the frequencies of a text of max_model_len "
            "tokens; set no more than your texts need, see docs/use/models.md"
        )
    return warning + "past them, a window or an eviction method may score better than full attention"


def check_length(model: ModelConfig, config: EngineConfig) -> None:
    """Checks that a model with a table of positions has one for each token of a text.

    Raises:
      ConfigError: it has fewer.
    """
    # The last token of a text is sampled and never computed.
    if model.position_offset is not None and (config.max_model_len or 0) - 1 > model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len:,}, this model has a table of {model.max_position:,} positions"
        )


def check_policies(config: EngineConfig, model: ModelConfig | None = None) -> EngineConfig:
    """Checks the names of policies and codecs, which `config` itself cannot import, and its drafts with a model;
    returns the configuration.

    Raises:
      ConfigError: there is no such policy or codec, or a setting of one is out of range.
    """
    if config.kv_cache_dtype != "auto":
        check_kv_dtype(config.kv_cache_dtype)
    find_scheduling_policy(config.policy)
    find_replacement_policy(config.prefix_replacement)
    if (eviction := read_eviction(config.kv_eviction)) is not None:
        check_priority(eviction)
        name = (eviction.measures or not eviction.head_by_head) and f"kv_eviction {type(eviction).__name__}"
        refusals.check(config.used() | {refusals.COMPARES_HEADS: name})
    read_selection(config.kv_selection)
    read_state_snapshots(config.state_snapshots)
    method, most = read_speculative(config.speculative_config), config.max_num_batched_tokens
    if method is not None:
        recurrent = {refusals.RECURRENT: model is not None and model.recurrent is not None}
        refusals.check(config.used() | _used_by(method) | recurrent)
    if method is not None and method.num_speculative_tokens >= most:
        raise ConfigError(
            f"speculative_config: {method.num_speculative_tokens} draft tokens and one more do not fit into a step of "
            f"max_num_batched_tokens {most}"
        )
    return config


def _used_by(method: SpeculativeMethod) -> dict[str, object]:
    """Returns which settings of a method others exclude, see `refusals`."""
    return {
        refusals.BRANCHES: method.draws_trees,
        refusals.COMPARES: method.acceptance != "sampled"
        and f'speculative_config with acceptance "{method.acceptance}"',
        refusals.DRAFT_MODEL: method.has_model,
    }
