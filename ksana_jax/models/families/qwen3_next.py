"""Qwen3-Next: gated delta rules in three of four layers, gated attention in the others, and experts."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import delta_rule, glm4, qwen2_moe, qwen3_moe, routing
from ksana_jax.models.families.family import Family, Name, View
from ksana_jax.models.families.fields import MAX_LAYERS, Fields

# Each head of queries is followed by its gate.
QUERIES = View("self_attn.q_proj.weight", ("w_q", "w_out_gate"), "num_heads")
GATED = dict.fromkeys(QUERIES.fields, QUERIES)
# Queries, keys, values and gates, and betas and decays, are grouped by head of keys.
QKVZ = View("linear_attn.in_proj_qkvz.weight", ("w_q", "w_k", "w_v", "w_out_gate"), "recurrent.num_key_heads")
BA = View("linear_attn.in_proj_ba.weight", ("w_beta", "w_decay"), "recurrent.num_key_heads")
DELTA_NAMES: dict[str, Name] = delta_rule.NAMES | dict.fromkeys(QKVZ.fields, QKVZ) | dict.fromkeys(BA.fields, BA)
DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def read(fields: Fields) -> dict[str, Any]:
    return read_layers(fields) | qwen3_moe.read_experts(fields, fields.integer(qwen2_moe.SHARED))


def read_layers(fields: Fields) -> dict[str, Any]:
    """Returns what dense models and those with experts share."""
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, (False,), "supported: false")
    num_layers, each = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.integer("full_attention_interval")
    kinds = [delta_rule.KINDS[(layer + 1) % each == 0] for layer in range(num_layers)]
    eps = fields.number("rms_norm_eps", fields.get("rms_norm_eps"))
    spec = delta_rule.read_layers(fields, kinds, eps=eps)
    return {"recurrent": spec, "norm": "rms_plus_one", "qk_norm": "head", "out_gate": True}


def write(config: ModelConfig) -> dict[str, Any]:
    shared = config.experts.shared_d_ff if config.experts else 1
    return delta_rule.write_layers(config) | qwen3_moe.write_experts(config) | {qwen2_moe.SHARED: shared}


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        qwen2_moe.SHARED: 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    read=read,
    write=write,
    layer_names=qwen2_moe.NAMES | GATED,
    plain_names=routing.PLAIN_NAMES,
    recurrent_names=DELTA_NAMES,
    buffers=r"mtp\..*",
    mlps=routing.MLPS,
    write_rope=glm4.write_rope,
)
