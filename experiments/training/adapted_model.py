"""The model that an adapter is trained for: any of full attention that the engine loads, with its own tokenizer."""

from __future__ import annotations

import functools

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.loading.config_json import load_config
from ksana_jax.tokenizers.base import Tokenizer
from ksana_jax.tokenizers.load import load_tokenizer


@functools.cache
def adapted_model(name: str) -> ModelConfig:
    """Returns the configuration of a model, given by path or name.

    Raises:
      ConfigError: training does not compute such a model; the message says why.
      LoadError: it does not exist.
    """
    config = load_config(name)
    specs = [layer.attention for layer in config.layers]
    problems = {
        "windows": any(spec.pattern != AttentionPattern() for spec in specs),
        "soft caps": any(spec.soft_cap is not None for spec in specs),
        "ALiBi": any(spec.alibi is not None for spec in specs),
        "ropes that differ by layer": len({spec.rope for spec in specs}) > 1,
        "another scale of scores than 1/sqrt(head_dim)": any(spec.scale != spec.head_dim**-0.5 for spec in specs),
        "experts": any(layer.mlp.experts is not None for layer in config.layers),
    }
    if found := [problem for problem, has in problems.items() if has]:
        raise ConfigError(f"init_from: {name} has {', '.join(found)}, with which no adapter is trained here")
    return config


@functools.cache
def adapted_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer of a model, given by path or name.

    Raises:
      TokenizerError: it has none.
    """
    return load_tokenizer(name)
