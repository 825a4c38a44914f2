"""Llama 1, 2 and 3.x, and the many checkpoints in their format (arXiv:2302.13971, 2307.09288, 2407.21783)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import Family, refuse_windows
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": fields.flag("mlp_bias")}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    defaults={"bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
)
