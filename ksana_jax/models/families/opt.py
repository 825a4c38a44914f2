"""OPT: a table of positions whose first two rows are padding, layer norms with biases, and ReLU (arXiv:2205.01068)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import LAYER_NAMES, Family, refuse_windows, with_bias
from ksana_jax.models.families.fields import Fields
from ksana_jax.models.families.gpt_neox import UNGATED
from ksana_jax.models.families.rope import read_no_rope

NAMES = LAYER_NAMES | {
    "attn_norm": with_bias("self_attn_layer_norm"),
    "w_o": "self_attn.out_proj.weight",
    "b_o": "self_attn.out_proj.bias",
    "mlp_norm": with_bias("final_layer_norm"),
    "w_up": "fc1.weight",
    "b_up": "fc1.bias",
    "w_down": "fc2.weight",
    "b_down": "fc2.bias",
}


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        fields.must_be(name, (True,), "supported: true")
    fields.must_be("_remove_final_layer_norm", (False,), "supported: false")
    width, bias = fields.integer("hidden_size"), fields.flag("enable_bias")
    fields.must_be("word_embed_proj_dim", (width,), f"supported: {width}, the hidden_size")
    return {"norm": "layer", "position_offset": 2, "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"enable_bias": config.qkv_bias, "word_embed_proj_dim": config.d_model}


OPT = Family(
    model_type="opt",
    architectures=("OPTForCausalLM",),
    defaults={
        "rms_norm_eps": 1e-5,
        "enable_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
    },
    read=read,
    write=write,
    top_names={
        "embed": "model.decoder.embed_tokens.weight",
        "positions": "model.decoder.embed_positions.weight",
        "final_norm": with_bias("model.decoder.final_layer_norm"),
        "head": "lm_head.weight",
    },
    layer_names=NAMES,
    layer_prefix="model.decoder.layers.{}.",
    renamed={r"decoder\.": "model.decoder."},
    fields={
        "intermediate_size": "ffn_dim",
        "rms_norm_eps": None,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    activation="activation_function",
    mlps={"relu": "relu"} | UNGATED,
    read_rope=read_no_rope,
    write_rope=lambda config: {},
)
