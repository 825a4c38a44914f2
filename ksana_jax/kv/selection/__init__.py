"""KV selection: decides which blocks, or tokens, of a text a query reads. Nothing is evicted. SELECTION_METHODS has one
entry and file for each.

A method of your own needs no entry: `kv_selection={"method": "my_package.module:Mine", "budget": 1024}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.plugins import read_method
from ksana_jax.kv.selection.base import SelectionMethod

SELECTION_METHODS: dict[str, str] = {
    "quest": "ksana_jax.methods.selection.quest:Quest",
    "rocketkv": "ksana_jax.methods.selection.rocketkv:RocketKV",
    "lightning_indexer": "ksana_jax.methods.selection.lightning_indexer:LightningIndexer",
}


def read_selection(setting: Mapping[str, Any] | None) -> SelectionMethod | None:
    """Returns the method of `EngineConfig.kv_selection`; with None, queries read all blocks.

    Args:
      setting: {"method": a key of SELECTION_METHODS or "package.module:Class", and the fields of that class}.

    Raises:
      ConfigError: the method or a field does not exist, or a value is out of range.
    """
    if setting is None:
        return None
    example = '{"method": "quest", "budget": 1024}'
    return read_method(setting, SELECTION_METHODS, SelectionMethod, "kv_selection", example)
