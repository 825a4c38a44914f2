"""GLM-4.7-Flash: DeepSeek V3's latents and experts, in layers that a list names (Z.ai, 2026)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import latents, routing
from ksana_jax.models.families.deepseek import read_plain_layers, read_sigmoid_experts, write_plain_layers
from ksana_jax.models.families.family import BUFFERS, Family
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    plain = read_plain_layers(fields, 1)
    fields.must_be("first_k_dense_replace", (len(plain),), f"mlp_layer_types has {len(plain)} dense layers")
    for name, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        fields.must_be(name, (value,), f"supported: {value}")
    return latents.read_latents(fields) | read_sigmoid_experts(fields, plain)


def write(config: ModelConfig) -> dict[str, Any]:
    return latents.write_latents(config) | latents.write_experts(config) | write_plain_layers(config)


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    defaults={
        **latents.DEFAULTS,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    read=read,
    write=write,
    layer_names=latents.EXPERTS,
    plain_names=routing.PLAIN_NAMES,
    fields=latents.FIELDS,
    mlps=routing.MLPS,
    read_rope=latents.read_rope,
    # Layer 47 guesses the token after next; it is no layer of the model.
    buffers=rf"{BUFFERS}|model\.layers\.47\..*",
)
