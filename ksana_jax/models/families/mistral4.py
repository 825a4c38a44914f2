"""Mistral 4, the part that reads text: latents with YaRN, queries that grow as Ministral 3's, and experts that softmax
chooses from groups (Mistral AI, 2026)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.families import latents, ministral, routing
from ksana_jax.models.families.family import Family, View
from ksana_jax.models.families.fields import Fields

GATE_UP = View("mlp.experts.gate_up_proj", ("w_gate_experts", "w_up_experts"))
ROPE = ministral.ROPE | {"rope_theta": 1e4, "factor": 128.0, ministral.ORIGINAL: 8192}


def read(fields: Fields) -> dict[str, Any]:
    # Configs of models that also read images may have another model's text.
    fields.must_be("model_type", ("mistral4",), "supported: mistral4")
    for name, value in {"scoring_func": "softmax", "topk_method": "greedy"}.items():
        fields.must_be(name, (value,), f"supported: {value}")
    found = latents.read_latents(fields)
    fields.must_be("head_dim", (_head_dim(fields),), "must be qk_nope_head_dim + qk_rope_head_dim")
    groups: dict[str, Any] = latents.read_groups(fields, 2)
    experts = latents.read_experts(fields, normalised=fields.flag("norm_topk_prob"), **groups)
    return found | experts | ministral.read_growth(fields)


def _head_dim(fields: Fields) -> int:
    return fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")


def write(config: ModelConfig) -> dict[str, Any]:
    written = latents.write_latents(config) | latents.write_experts(config)
    rotated = written["head_dim"]
    return written | {"qk_rope_head_dim": rotated, "head_dim": rotated + written["qk_nope_head_dim"]}


def read_rope(fields: Fields, max_position: int) -> RopeConfig:
    """Reads the rope, whose partial_rotary_factor is of a head, as `latents.read_rope` does."""
    part = fields.integer("qk_rope_head_dim") / _head_dim(fields)
    return latents.of_tokens(fields, ministral.read_ropes(fields, max_position, {"partial_rotary_factor": part}))


MISTRAL4 = Family(
    model_type="mistral4",
    architectures=("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"),
    defaults={
        **latents.DEFAULTS,
        "num_key_value_heads": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "head_dim": _head_dim,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": lambda fields: None if fields.get("rope_scaling") else ROPE,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    write=write,
    layer_names=latents.EXPERTS
    | {**dict.fromkeys(GATE_UP.fields, GATE_UP), "w_down_experts": View("mlp.experts.down_proj")},
    plain_names=routing.PLAIN_NAMES,
    renamed={r"language_model\.lm_head": "lm_head", r"(model\.)?language_model\.(model\.)?": "model."},
    buffers=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    mlps=routing.MLPS,
    read_rope=read_rope,
    write_rope=ministral.write_ropes,
)
