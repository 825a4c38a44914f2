"""Converts between nested mappings and dotted keys: {"a": {"b": 1}} and "a.b=1" are equivalent."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from yaml import YAMLError

from ksana_jax.core.config import ConfigError
from ksana_jax.core.yaml_numbers import check_numbers


def plain(config: Any, resolve: bool = False) -> dict[str, Any]:
    """Converts an omegaconf mapping to dicts, lists and values; resolve replaces its `${...}`.

    Raises:
      ConfigError: it is not a mapping.
    """
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(config, resolve=resolve)
    if not isinstance(content, dict):
        raise ConfigError("not a mapping of keys to values")
    return cast(dict[str, Any], content)


def from_yaml(text: str) -> dict[str, Any]:
    """Reads a YAML file's text.

    Raises:
      ConfigError: it is not a mapping, or has a number that a person reads otherwise than YAML 1.1 does.
      OmegaConfBaseException, YAMLError, OSError: it cannot be read.
    """
    from omegaconf import OmegaConf

    given = plain(OmegaConf.load(io.StringIO(text)))
    check_numbers(given, text)
    return given


def dotlist(overrides: Sequence[str]) -> dict[str, Any]:
    """Converts ["a.b=1"] to {"a": {"b": 1}}; values are read as YAML.

    Raises:
      ConfigError: an override is not key=value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for item in overrides:
        if "=" not in item or item.startswith("="):
            raise ConfigError(f"{item!r} is not an override: write key=value, for instance engine.block_size=8")
    try:
        for item in overrides:
            key, _, text = item.partition("=")
            value = OmegaConf.select(OmegaConf.from_dotlist([item]), key, throw_on_resolution_failure=False)
            check_numbers(value, text, key)
        return plain(OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"overrides {' '.join(overrides)}: {str(error).splitlines()[0]}") from error
    except RecursionError:
        raise ConfigError(f"overrides {' '.join(overrides):.80}...: nested too deeply to be read") from None


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Converts {"a.b": 1} to {"a": {"b": 1}}; nested mappings stay nested."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = str(key).split(".")
        leaf = {last: nested(value) if isinstance(value, Mapping) else value}
        for parent in reversed(parents):
            leaf = {parent: leaf}
        result = merge(result, leaf)
    return result


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Converts {"a": {"b": 1}} to {"a.b": 1}."""
    result = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        result.update(flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return result


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merges mappings key by key, later ones over earlier ones; other values, including lists, are replaced."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = result.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            result[key] = merge(cast(Mapping, old), value) if both else value
    return result


def at(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value at a dotted key; None if a part of it is missing."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the values of keys that differ between two flat configurations; None for a key that one of them lacks."""
    keys = dict.fromkeys((*a, *b))
    # As JSON, in which NaN equals itself.
    texts = {k: [json.dumps(values.get(k), sort_keys=True) for values in (a, b)] for k in keys}
    return {k: (a.get(k), b.get(k)) for k, (mine, theirs) in texts.items() if mine != theirs}


def changes_text(differing: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns the values of `differing` as text: "key 1 → 2, other none → x"."""
    texts = {key: ["none" if value is None else value for value in both] for key, both in differing.items()}
    return ", ".join(f"{key} {a} → {b}" for key, (a, b) in texts.items())
