"""Ids of trials: a hash of what differs from the defaults, so that a setting added later changes none. No jax.

Ids are computed from configs, also from those in the records of earlier versions: the id that a record carries only
links its lines. A default that changes later therefore separates old trials from new ones, as it should.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ksana_jax.config import EngineConfig
from ksana_jax.experiments.tasks import task_named
from ksana_jax.patterns import AttentionPattern


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def trial_id(config: Mapping[str, Any]) -> str:
    """The id of a resolved config: 12 hex digits.

    Raises:
      ConfigError: its task is unknown.
    """
    parts: dict[str, Any] = dict(config)
    for name, kind in (("engine", EngineConfig), ("settings", task_named(config["task"]).Settings)):
        parts[name] = differing(config[name], kind)
    if config["pattern"] is not None:
        parts["pattern"] = _pattern(config["pattern"])
    parts["layer_patterns"] = [_pattern(p) for p in config["layer_patterns"]]
    # An empty pattern is full attention; none, or no list of them, is what a key says that an older config lacks.
    parts = {name: value for name, value in parts.items() if value is not None and value != []}
    return hashlib.sha256(canonical(parts).encode()).hexdigest()[:12]


def recorded_id(start: Mapping[str, Any]) -> str:
    """Today's id of a recorded trial, whichever version wrote it; the id it carries where its config does not say."""
    try:
        return trial_id(start["config"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return start["trial"]


def differing(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The values that are not the defaults of a dataclass, mappings of nested dataclasses included."""
    found = dict(values)
    for field in dataclasses.fields(kind):
        if field.name not in found:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is dataclasses.MISSING:
            continue
        if field.metadata.get("files"):
            # Where they lie does not matter: the config's inputs have a digest of what they hold.
            del found[field.name]
            continue
        value = found[field.name]
        if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
            found[field.name] = value = differing(value, type(default))
            default = {}
        if canonical(value) == canonical(default):
            del found[field.name]
    return found


def _pattern(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = differing(fields, AttentionPattern)
    if not fields.get("num_sinks"):
        # How sinks are seen changes nothing where there are none, whatever the default of the day.
        found = {k: v for k, v in found.items() if k not in ("sink_position", "sink_ceiling")}
    return found
