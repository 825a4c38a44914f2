"""Ids of trials: hashes of the values that differ from the defaults, so adding a setting changes no id. No jax.

Ids are computed from configs, including those in records of earlier versions; the id in a record only links its lines.
If a default changes, old trials therefore differ from new ones, as they should.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.lab.runs import dotted
from ksana_jax.lab.runs.models import COMMIT
from ksana_jax.lab.runs.tasks import task_named

# Settings of the engine that records of earlier versions have by another name.
RENAMED = {
    "max_rotated_sinks": "max_repositioned_sinks",
    "attention_implementation": "operators.attention",
    "linear_implementation": "operators.linear",
    "prefer": "operators.prefer",
}

# Errors from reading a config that is not a trial's.
_NO_CONFIG = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def canonical(value: Any) -> str:
    """Returns JSON with sorted keys and no spaces, so equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def trial_id(config: Mapping[str, Any]) -> str:
    """Returns the id of a resolved config, 12 hex digits.

    Raises:
      ConfigError: its task is unknown.
    """
    return hashlib.sha256(canonical(defining(config)).encode()).hexdigest()[:12]


def defining(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a resolved config that define a trial: those other than the defaults, by current names.

    Raises:
      ConfigError: its task is unknown.
    """
    parts: dict[str, Any] = dict(config)
    if "point" in config:  # a row of a benchmark, which lists all of its settings
        return parts
    if "inputs" in config:
        parts["inputs"] = contents(config["inputs"])
    parts["engine"] = differing(_by_current_names(config["engine"]), EngineConfig)
    for name in {"kv_eviction", "kv_cache_dtype"} & parts["engine"].keys():
        parts["engine"][name] = _without_files(parts["engine"][name])
    parts["settings"] = differing(config["settings"], task_named(config["task"]).Settings)
    if config["pattern"] is not None:
        parts["pattern"] = _pattern(config["pattern"])
    parts["layer_patterns"] = [_pattern(p) for p in config["layer_patterns"]]
    # An empty pattern is full attention; None, or an empty list, equals a key that an older config does not have.
    return {name: value for name, value in parts.items() if value is not None and value != []}


def _without_files(method: Any) -> Any:
    """Returns the setting of a method without files of numbers about the model: inputs have digests of the numbers."""
    if not isinstance(method, Mapping):
        return method
    return {name: _without_files(value) for name, value in method.items() if name != "statistics"}


def contents(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the inputs of a trial without the commits that they come from: equal files are equal inputs."""
    return {name: digest for name, digest in inputs.items() if not name.endswith(COMMIT)}


def recorded_id(start: Mapping[str, Any]) -> str:
    """Returns the current id of a recorded trial of any version; its recorded id if its config has no known task."""
    try:
        return trial_id(start["config"])
    except _NO_CONFIG:
        return start["trial"]


def recorded_config(start: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `defining` of a recorded trial of any version; its whole config if its task is not known, or not trusted;
    empty without a readable one."""
    try:
        return defining(start["config"])
    except _NO_CONFIG:
        config: Any = start.get("config")
        parts = [config, config.get("engine"), config.get("settings")] if isinstance(config, dict) else [None]
        return config if all(isinstance(part, dict) for part in parts) else {}


def differing(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Returns the values that differ from a dataclass's defaults, including values in nested dataclasses."""
    found = dict(values)
    for field in dataclasses.fields(kind):
        if field.name not in found:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is dataclasses.MISSING:
            continue
        if field.metadata.get("files") or field.metadata.get("place"):
            # Places of files do not matter: the config's inputs have a digest of their contents. Nor do the places
            # of the devices.
            del found[field.name]
            continue
        if field.metadata.get("engine"):
            found[field.name] = _by_current_names(found[field.name])
        value = found[field.name]
        if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
            found[field.name] = value = differing(value, type(default))
            default = {}
        if canonical(value) == canonical(default):
            del found[field.name]
    return found


def _by_current_names(engine: Mapping[str, Any]) -> dict[str, Any]:
    return dotted.nested({RENAMED.get(name, name): value for name, value in engine.items()})


def _pattern(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = differing(fields, AttentionPattern)
    if not fields.get("num_sinks"):
        # Without sinks, their position has no effect, whatever the current default.
        found = {k: v for k, v in found.items() if k not in ("sink_position", "sink_ceiling")}
    if isinstance(heads := found.get("full_heads"), Mapping):
        found["full_heads"] = _without_files(heads)
    return found
