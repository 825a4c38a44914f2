"""Qwen1.5 and Qwen2 with experts, plus an MLP for all tokens (arXiv:2407.10671)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import qwen2, qwen3_moe, routing
from ksana_jax.models.families.family import Family, layer_windows
from ksana_jax.models.families.fields import Fields

SHARED = "shared_expert_intermediate_size"
NAMES = routing.NAMES | {
    "w_gate": "mlp.shared_expert.gate_proj.weight",
    "w_up": "mlp.shared_expert.up_proj.weight",
    "w_down": "mlp.shared_expert.down_proj.weight",
    "w_shared_gate": "mlp.shared_expert_gate.weight",
}


def read(fields: Fields) -> dict[str, Any]:
    experts = qwen3_moe.read_experts(fields, fields.integer(SHARED))
    return {"qkv_bias": fields.flag("qkv_bias"), **experts, **layer_windows(fields)}


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **qwen2.write_windows(config),
        **qwen3_moe.write_experts(config),
        "qkv_bias": config.qkv_bias,
        SHARED: config.experts.shared_d_ff if config.experts else 1,
    }


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    defaults={
        **qwen2.WINDOW_DEFAULTS,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        SHARED: 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
    },
    read=read,
    write=write,
    layer_names=NAMES,
    plain_names=routing.PLAIN_NAMES,
    mlps=routing.MLPS,
)
