"""KV eviction: decides which tokens of a running text stay cached. EVICTION_METHODS has one entry and file for each.

docs/reference/eviction.md compares each method's defaults with its authors' and kvpress', whose tokens the engine keeps
(tests/golden/kvpress).

A method of your own needs no entry: `kv_eviction={"method": "my_package.module:Mine", "budget": 0.2}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.plugins import read_method
from ksana_jax.kv.eviction.base import EvictionMethod

EVICTION_METHODS: dict[str, str] = {
    "h2o": "ksana_jax.methods.eviction.h2o:H2O",
    "keyformer": "ksana_jax.methods.eviction.keyformer:Keyformer",
    "d2o": "ksana_jax.methods.eviction.d2o:D2O",
    "mikv": "ksana_jax.methods.eviction.mikv:MiKV",
    "snapkv": "ksana_jax.methods.eviction.snapkv:SnapKV",
    "adakv": "ksana_jax.methods.eviction.adakv:AdaKV",
    "cake": "ksana_jax.methods.eviction.cake:CAKE",
    "chunkkv": "ksana_jax.methods.eviction.chunkkv:ChunkKV",
    "rkv": "ksana_jax.methods.eviction.rkv:RKV",
    "kvzip": "ksana_jax.methods.eviction.kvzip:KVzip",
    "tova": "ksana_jax.methods.eviction.tova:TOVA",
    "knorm": "ksana_jax.methods.eviction.knorm:KNorm",
    "keydiff": "ksana_jax.methods.eviction.keydiff:KeyDiff",
    "lagkv": "ksana_jax.methods.eviction.lagkv:LagKV",
    "qfilter": "ksana_jax.methods.eviction.qfilter:QFilter",
    "expected_attention": "ksana_jax.methods.eviction.expected_attention:ExpectedAttention",
    "expected_attention_stats": "ksana_jax.methods.eviction.expected_attention:ExpectedAttentionStats",
    "criticalkv": "ksana_jax.methods.eviction.criticalkv:CriticalKV",
    "prefill_decode": "ksana_jax.methods.eviction.prefill_decode:PrefillDecode",
    "vatp": "ksana_jax.methods.eviction.vatp:VATP",
    "window": "ksana_jax.methods.eviction.window:Window",
    "streaming_llm": "ksana_jax.methods.eviction.window:StreamingLLM",
    "random": "ksana_jax.methods.eviction.random:Random",
    "oracle": "ksana_jax.methods.eviction.oracle:Oracle",
}


def keep_statistics(setting: Any, now: Any) -> Any:
    """Returns a setting with the `statistics` files that the same methods read now, unless it names others."""
    if not (isinstance(setting, Mapping) and isinstance(now, Mapping) and setting.get("method") == now.get("method")):
        return setting
    found = {name: keep_statistics(value, now.get(name)) for name, value in setting.items()}
    return {"statistics": now["statistics"], **found} if "statistics" in now else found


def read_eviction(setting: Mapping[str, Any] | None) -> EvictionMethod | None:
    """Returns the method of `EngineConfig.kv_eviction`; None evicts nothing.

    Args:
      setting: {"method": a key of EVICTION_METHODS or "package.module:Class", and the fields of that class}.

    Raises:
      ConfigError: the method or a field does not exist, or a value is out of range.
    """
    if setting is None:
        return None
    example = '{"method": "h2o", "budget": 0.2}'
    return read_method(setting, EVICTION_METHODS, EvictionMethod, "kv_eviction", example)
