"""OLMo 2: norms after attention and MLP instead of before them, and over all heads of q and of k (arXiv:2501.00656).

In bfloat16, transformers multiplies by a norm's weight before it rounds; here it rounds first, as for a Llama.
"""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import LAYER_NAMES, Family
from ksana_jax.models.families.fields import Fields

NAMES = LAYER_NAMES | {
    "q_proj_norm": "self_attn.q_norm.weight",
    "k_proj_norm": "self_attn.k_norm.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def read(fields: Fields) -> dict[str, Any]:
    fields.must_be("sliding_window", (), "supported by olmo3")
    return read_norms(fields)


def read_norms(fields: Fields) -> dict[str, Any]:
    fields.must_be("mlp_bias", (False,), "supported: false")
    bias = fields.flag("attention_bias")
    return {"norm_placement": "after", "qk_norm": "projection", "qkv_bias": bias, "out_bias": bias}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    read=read,
    write=write,
    layer_names=NAMES,
)
