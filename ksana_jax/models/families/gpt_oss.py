"""gpt-oss: experts with biases, a sink logit for each head, and a window in every other layer (arXiv:2508.10925)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec, RopeConfig
from ksana_jax.models.families import routing
from ksana_jax.models.families.family import Family, View, layer_kinds, sliding_in, write_windows
from ksana_jax.models.families.fields import MAX_LAYERS, Fields
from ksana_jax.models.families.rope import read_rope, rope_fields

NUMBER = "num_local_experts"
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
# Rows of gate and up take turns.
GATE_UP = View("mlp.experts.gate_up_proj", ("w_gate_experts", "w_up_experts"), "d_ff", transposed=True)
GATE_UP_BIAS = View("mlp.experts.gate_up_proj_bias", ("b_gate_experts", "b_up_experts"), "d_ff")
NAMES = routing.OTHER_NAMES | {
    "sink_logits": "self_attn.sinks",
    "w_router": "mlp.router.weight",
    "b_router": "mlp.router.bias",
    **dict.fromkeys(GATE_UP.fields, GATE_UP),
    **dict.fromkeys(GATE_UP_BIAS.fields, GATE_UP_BIAS),
    "w_down_experts": View("mlp.experts.down_proj", transposed=True),
    "b_down_experts": "mlp.experts.down_proj_bias",
}


def read(fields: Fields) -> dict[str, Any]:
    count, bias = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.flag("attention_bias")
    kinds = layer_kinds(fields, [("sliding_attention", "full_attention")[i % 2] for i in range(count)])
    experts = routing.read_experts(fields, NUMBER)
    # Other names of these numbers, in configs of OpenAI and of transformers.
    for name, value in {"num_experts": experts.num_experts, "experts_per_token": experts.num_chosen}.items():
        fields.must_be(name, (value,), f"{NUMBER} is {experts.num_experts}, num_experts_per_tok {experts.num_chosen}")
    return {
        "pattern": sliding_in(fields, kinds),
        "sinks": "learned",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "experts": dataclasses.replace(
            experts,
            sigmoid_factor=fields.number("swiglu_alpha", fields.get("swiglu_alpha")),
            limit=fields.number("swiglu_limit", fields.get("swiglu_limit")),
        ),
    }


def read_ropes(fields: Fields, max_position: int) -> RopeConfig:
    rope = read_rope(fields, max_position)
    original = rope.original_max_len or max_position
    fields.must_be("initial_context_length", (original,), f"the rope's original_max_position_embeddings is {original}")
    return rope


def write(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts or ExpertsSpec(1, 1)
    return {
        **write_windows(config),
        **routing.write_experts(config, NUMBER),
        "attention_bias": config.qkv_bias,
        "swiglu_alpha": experts.sigmoid_factor,
        "swiglu_limit": experts.limit,
    }


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    """Returns the rope as config fields; without any, it is scaled."""
    written = rope_fields(config.layers[0].attention.rope)
    if written["rope_scaling"]:
        return written
    return {"rope_parameters": {"rope_type": "default", "rope_theta": written["rope_theta"]}}


GPT_OSS = Family(
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": lambda fields: None if fields.get("rope_scaling") else ROPE,
        "sliding_window": 128,
        "attention_bias": True,
        NUMBER: lambda fields: fields.values.get("num_experts", 128),
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    read=read,
    write=write,
    layer_names=NAMES,
    mlps=dict.fromkeys(routing.MLPS, "clamped_swiglu_experts"),
    read_rope=read_ropes,
    write_rope=write_ropes,
)
