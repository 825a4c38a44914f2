"""Refuses numbers that YAML 1.1 reads otherwise than a person: 0100 is 64 (base 8), and 1:30 is 90 (base 60)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ksana_jax.core.errors import ConfigError

_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9]+)+(\.[0-9_]*)?)")


def check_numbers(value: Any, text: str, key: str = "") -> None:
    """Compares a value with the YAML text that it was read from; names and titles may be such numbers.

    Args:
      key: of the value, for the message.

    Raises:
      ConfigError: a number is in another base; gives its key, and both readings.
    """
    _check(key, value, yaml.load(text, yaml.BaseLoader))


def _check(key: str, value: Any, written: Any) -> None:
    if key.rpartition(".")[2] in ("name", "title"):
        return
    if isinstance(value, Mapping) and isinstance(written, Mapping):
        for name in value.keys() & written.keys():
            _check(f"{key}.{name}" if key else name, value[name], written[name])
    elif isinstance(value, int | float) and isinstance(written, str) and _OTHER_BASE.fullmatch(written):
        raise ConfigError(
            f"{key} has {written:.60}, which YAML reads as {value}: write a number without leading zeros and colons, "
            "or text in quotes"
        )
    elif isinstance(value, Sequence) and isinstance(written, list):
        for item, part in zip(value, written, strict=False):
            _check(key, item, part)
