"""GLM-4-0414: norms before and after attention and MLP, biases on q, k and v, neighbours rotated in half of each head
(arXiv:2406.12793)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import LAYER_NAMES, Family, View, refuse_windows
from ksana_jax.models.families.fields import Fields
from ksana_jax.models.families.rope import rope_fields

GATE_UP = View("mlp.gate_up_proj.weight", ("w_gate", "w_up"))
NAMES = LAYER_NAMES | {
    "w_gate": GATE_UP,
    "w_up": GATE_UP,
    "post_attn_norm": "post_self_attn_layernorm.weight",
    "post_mlp_norm": "post_mlp_layernorm.weight",
}


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    fields.must_be("mlp_bias", (False,), "supported: false")
    return {"norm_placement": "both", "qkv_bias": fields.flag("attention_bias")}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    rope = config.layers[0].attention.rope
    return {**rope_fields(rope), "partial_rotary_factor": rope.partial_rotary_factor}


GLM4 = Family(
    model_type="glm4",
    architectures=("Glm4ForCausalLM",),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": [151329, 151336, 151338],
    },
    read=read,
    write=write,
    layer_names=NAMES,
    write_rope=write_rope,
    rotates_neighbours=True,
)
