"""OLMoE: a Llama of experts, with norms over all heads of q and of k (arXiv:2409.02060)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import routing
from ksana_jax.models.families.family import Family, refuse_windows
from ksana_jax.models.families.fields import Fields

NAMES = routing.NAMES | {"q_proj_norm": "self_attn.q_norm.weight", "k_proj_norm": "self_attn.k_norm.weight"}


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    fields.must_be("clip_qkv", (), "supported: null")
    bias = fields.flag("attention_bias")
    experts = routing.read_experts(fields, "num_experts", normalised=fields.flag("norm_topk_prob"))
    return {"qk_norm": "projection", "qkv_bias": bias, "out_bias": bias, "experts": experts}


def write(config: ModelConfig) -> dict[str, Any]:
    return routing.write_experts(config, "num_experts") | {
        "attention_bias": config.qkv_bias,
        "norm_topk_prob": config.experts is not None and config.experts.normalised,
    }


OLMOE = Family(
    model_type="olmoe",
    architectures=("OlmoeForCausalLM",),
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8},
    read=read,
    write=write,
    layer_names=NAMES,
    mlps=routing.MLPS,
)
