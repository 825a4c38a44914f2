"""Qwen2 and Qwen2.5: biases on q, k and v; later layers may have a sliding window (arXiv:2407.10671, 2412.15115)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import per_layer
from ksana_jax.models.families.family import Family, layer_windows, write_windows
from ksana_jax.models.families.fields import Fields

WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


def read(fields: Fields) -> dict[str, Any]:
    # attention_bias is not read: regardless of it, this family has biases on q, k and v and none on the output.
    fields.must_be("mlp_bias", (False,), "supported: false")
    return {"qkv_bias": True, **layer_windows(fields)}


def write(config: ModelConfig) -> dict[str, Any]:
    windows = [pattern.window for pattern in per_layer(config.pattern, config.num_layers)]
    first = next((i for i, window in enumerate(windows) if window is not None), len(windows))
    return {"use_sliding_window": any(windows), "max_window_layers": first, **write_windows(config)}


QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    defaults={"num_key_value_heads": 32, **WINDOW_DEFAULTS},
    read=read,
    write=write,
)
