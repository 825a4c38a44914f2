"""Dense Qwen3: queries and keys are normalised per head; later layers may have a sliding window (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import qwen2
from ksana_jax.models.families.family import Family, layer_windows
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    fields.must_be("mlp_bias", (False,), "supported: false")
    bias = fields.flag("attention_bias")
    return {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias, **layer_windows(fields)}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, **qwen2.write(config)}


QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    defaults={"num_key_value_heads": 32, "head_dim": 128, **qwen2.WINDOW_DEFAULTS},
    read=read,
    write=write,
)
