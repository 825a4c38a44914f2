"""Qwen3.5 and Qwen3.6, the part that reads text: Qwen3-Next with separate projections, dense or with experts."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import delta_rule, glm4, qwen2_moe, qwen3_next, routing
from ksana_jax.models.families.family import LAYER_NAMES, Family, Name, View
from ksana_jax.models.families.fields import Fields

QKV = View("linear_attn.in_proj_qkv.weight", ("w_q", "w_k", "w_v"))
DELTA_NAMES: dict[str, Name] = delta_rule.NAMES | {
    **dict.fromkeys(QKV.fields, QKV),
    "w_out_gate": "linear_attn.in_proj_z.weight",
    "w_beta": "linear_attn.in_proj_b.weight",
    "w_decay": "linear_attn.in_proj_a.weight",
}


def read_experts(fields: Fields) -> dict[str, Any]:
    experts = routing.read_experts(fields, "num_experts", shared_d_ff=fields.integer(qwen2_moe.SHARED))
    fields.must_be("norm_topk_prob", (True,), "supported: true")
    return qwen3_next.read_layers(fields) | {"experts": experts, "d_ff": fields.integer("moe_intermediate_size")}


def write_experts(config: ModelConfig) -> dict[str, Any]:
    shared = config.experts.shared_d_ff if config.experts else 1
    of_experts = routing.write_experts(config, "num_experts") | {"moe_intermediate_size": config.d_ff}
    return delta_rule.write_layers(config) | of_experts | {qwen2_moe.SHARED: shared}


def _family(kind: str, architecture: str, **more: Any) -> Family:
    return Family(
        model_type=f"{kind}_text",
        architectures=(f"{architecture}ForCausalLM", f"{architecture}ForConditionalGeneration"),
        recurrent_names=DELTA_NAMES,
        renamed={r"model\.language_model\.": "model."},
        buffers=r"(mtp|model\.visual)\..*",
        write_rope=glm4.write_rope,
        **more,
    )


QWEN3_5 = _family(
    "qwen3_5",
    "Qwen3_5",
    defaults={**qwen3_next.DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
    read=qwen3_next.read_layers,
    write=delta_rule.write_layers,
    layer_names=LAYER_NAMES | qwen3_next.GATED,
)
QWEN3_5_MOE = _family(
    "qwen3_5_moe",
    "Qwen3_5Moe",
    defaults={
        **qwen3_next.DEFAULTS,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        qwen2_moe.SHARED: 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    read=read_experts,
    write=write_experts,
    layer_names=qwen2_moe.NAMES | qwen3_next.GATED,
    mlps=routing.MLPS,
)
