"""KV eviction: which tokens of a running text stay in the cache. One file and one entry of EVICTION_METHODS each.

A method of your own needs no entry: `kv_eviction={"method": "my_package.module:Mine", "budget": 0.2}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.errors import ConfigError
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.plugins import nearest, resolve

EVICTION_METHODS: dict[str, str] = {
    "h2o": "ksana_jax.kv.eviction.h2o:H2O",
    "keyformer": "ksana_jax.kv.eviction.keyformer:Keyformer",
    "snapkv": "ksana_jax.kv.eviction.snapkv:SnapKV",
    "tova": "ksana_jax.kv.eviction.tova:TOVA",
    "knorm": "ksana_jax.kv.eviction.knorm:KNorm",
    "vatp": "ksana_jax.kv.eviction.vatp:VATP",
    "window": "ksana_jax.kv.eviction.window:Window",
    "streaming_llm": "ksana_jax.kv.eviction.window:StreamingLLM",
    "random": "ksana_jax.kv.eviction.random:Random",
    "oracle": "ksana_jax.kv.eviction.oracle:Oracle",
}


def read_eviction(setting: Mapping[str, Any] | None) -> EvictionMethod | None:
    """Returns the method of `EngineConfig.kv_eviction`; None evicts nothing.

    Args:
      setting: {"method": a key of EVICTION_METHODS or "package.module:Class", and the fields of that class}.

    Raises:
      ConfigError: there is no such method or field, or a value is out of range.
    """
    if setting is None:
        return None
    if not isinstance(setting, Mapping) or "method" not in setting:
        raise ConfigError(
            f'kv_eviction is {setting!r:.80}, must be None or a dict such as {{"method": "h2o", "budget": 0.2}}'
        )
    name, fields = setting["method"], {key: value for key, value in setting.items() if key != "method"}
    found = resolve(name, EVICTION_METHODS, "kv_eviction method")
    if not (isinstance(found, type) and issubclass(found, EvictionMethod)):
        raise ConfigError(f"kv_eviction method is {name!r}, which is not a subclass of EvictionMethod")
    known = [field.name for field in dataclasses.fields(found)]
    for key in fields:
        if key not in known:
            close = nearest(str(key), known)
            hint = f"; the nearest is {close!r}" if close else f"; it has {', '.join(known)}"
            raise ConfigError(f"kv_eviction {name!r} has no setting {key!r}{hint}")
    return found(**fields)
