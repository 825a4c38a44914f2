"""The attention patterns of a trial, and the groups of layers that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.kv.groups import group_layers
from ksana_jax.lab.runs.models import mixes_patterns, model_config, num_layers
from ksana_jax.methods.presets import names_heads, names_layers, plain_pattern, read_pattern, read_patterns


def patterns_of(config: Mapping[str, Any]) -> list[AttentionPattern]:
    """Returns the patterns in a trial's config: none (the model's own), one for all layers, one per layer, or one per
    kv head of each layer."""
    if names_heads(pattern := config["pattern"]):
        return list(read_patterns(pattern, model_config(config["model"])))
    given = config["layer_patterns"] or ([config["pattern"]] if config["pattern"] is not None else [])
    return [read_pattern(pattern) for pattern in given]


def layer_groups(config: Mapping[str, Any]) -> list[list[int]]:
    """Returns the layers (or kv heads) that share a block table, where patterns may group them otherwise than the
    model's own."""
    if not config["layer_patterns"] and not names_heads(config["pattern"]):
        is_one = config["pattern"] is not None and mixes_patterns(model := config["model"])
        return [list(range(num_layers(model) or 0))] if is_one else []
    groups = group_layers(patterns_of(config))
    return [list(group.layers) for group in groups] if len(groups) > 1 else []


def write_patterns(config: dict[str, Any]) -> None:
    """Writes all fields of a config's patterns, in whatever form they were given: equal patterns make equal trials.

    Raises:
      ConfigError: a pattern is invalid, or two settings name patterns.
    """
    if names_layers(pattern := config["pattern"]):
        if config["layer_patterns"]:
            raise ConfigError("pattern names layers, which does not go with layer_patterns")
        layers = read_patterns(pattern, model_config(config["model"]))
        config["pattern"], config["layer_patterns"] = None, list(layers)
    try:
        patterns = [dataclasses.asdict(pattern) for pattern in patterns_of(config)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if names_heads(pattern := config["pattern"]):
        if config["layer_patterns"]:
            raise ConfigError("pattern.full_heads does not go with layer_patterns")
        config["pattern"] = plain_pattern(pattern, model_config(config["model"]))
    elif config["layer_patterns"]:
        config["layer_patterns"] = patterns
    elif patterns:
        [config["pattern"]] = patterns
