"""Gemma-2: alternating sliding and full layers, soft caps on scores and logits, norms before and after each part
(arXiv:2408.00118)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import LAYER_NAMES, Family, layer_kinds, sliding_in, write_windows
from ksana_jax.models.families.fields import MAX_LAYERS, Fields

NAMES = LAYER_NAMES | {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def kinds_in_turn(fields: Fields) -> list[str]:
    """Returns the kind of each layer: `layer_types`, or else every `sliding_window_pattern`-th layer is full."""
    every = fields.integer("sliding_window_pattern")
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    return layer_kinds(
        fields, ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]
    )


def read(fields: Fields) -> dict[str, Any]:
    def cap(name: str) -> float | None:
        return None if fields.get(name) is None else fields.number(name, fields.get(name))

    fields.must_be("use_bidirectional_attention", (False,), "supported: false")
    kinds, bias = kinds_in_turn(fields), fields.flag("attention_bias")
    scalar = fields.number("query_pre_attn_scalar", fields.get("query_pre_attn_scalar"))
    return {
        "pattern": sliding_in(fields, kinds),
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_scale": scalar**-0.5,
        "soft_cap": cap("attn_logit_softcapping"),
        "logit_soft_cap": cap("final_logit_softcapping"),
        "embed_scale": fields.integer("hidden_size") ** 0.5,
        "norm": "rms_plus_one",
        "norm_placement": "both",
    }


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(config.layers[0].attention.scale ** -2),
        "attn_logit_softcapping": config.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        **write_windows(config),
    }


GEMMA2 = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    defaults={
        **DEFAULTS,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    read=read,
    write=write,
    layer_names=NAMES,
    activation="hidden_activation",
    mlps={"gelu_pytorch_tanh": "geglu"},
)
