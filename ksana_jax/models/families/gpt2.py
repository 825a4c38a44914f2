"""GPT-2: a table of positions instead of a rope, layer norms with biases, and matrices stored as [in, out]."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import Family, View, refuse_windows, with_bias
from ksana_jax.models.families.fields import Fields
from ksana_jax.models.families.gpt_neox import UNGATED
from ksana_jax.models.families.rope import read_no_rope

QKV = View("attn.c_attn.weight", ("w_q", "w_k", "w_v"), transposed=True)
QKV_BIAS = View("attn.c_attn.bias", ("b_q", "b_k", "b_v"))
NAMES = dict.fromkeys(QKV.fields, QKV) | dict.fromkeys(QKV_BIAS.fields, QKV_BIAS)
NAMES |= {
    "attn_norm": with_bias("ln_1"),
    "w_o": View("attn.c_proj.weight", transposed=True),
    "b_o": "attn.c_proj.bias",
    "mlp_norm": with_bias("ln_2"),
    "w_up": View("mlp.c_fc.weight", transposed=True),
    "b_up": "mlp.c_fc.bias",
    "w_down": View("mlp.c_proj.weight", transposed=True),
    "b_down": "mlp.c_proj.bias",
}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.must_be(name, (False,), "supported: false")
    scale = None if fields.flag("scale_attn_weights") else 1.0
    return {"norm": "layer", "position_offset": 0, "attention_scale": scale, **BIASES}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"scale_attn_weights": config.attention_scale is None}


GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    defaults={
        "rms_norm_eps": 1e-5,
        "intermediate_size": lambda fields: 4 * fields.integer("hidden_size"),
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    read=read,
    write=write,
    top_names={
        "embed": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "final_norm": with_bias("transformer.ln_f"),
        "head": "lm_head.weight",
    },
    layer_names=NAMES,
    layer_prefix="transformer.h.{}.",
    # The first checkpoints lack the prefix.
    renamed={r"(?=wte\.|wpe\.|ln_f\.|h\.\d)": "transformer."},
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    fields={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "num_key_value_heads": None,
        "head_dim": None,
    },
    activation="activation_function",
    mlps={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"} | UNGATED,
    read_rope=read_no_rope,
    write_rope=lambda config: {},
)
