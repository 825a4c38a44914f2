"""GPT-NeoX and Pythia: layer norms with biases, attention and MLP of the same hidden states, and a part of each head
rotated (arXiv:2204.06745, 2304.01373). A tensor holds q, k and v of each head together."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import glm4
from ksana_jax.models.families.family import Family, View, refuse_windows, with_bias
from ksana_jax.models.families.fields import Fields

QKV = View("attention.query_key_value.weight", ("w_q", "w_k", "w_v"), "num_heads")
QKV_BIAS = View("attention.query_key_value.bias", ("b_q", "b_k", "b_v"), "num_heads")
NAMES = dict.fromkeys(QKV.fields, QKV) | dict.fromkeys(QKV_BIAS.fields, QKV_BIAS)
NAMES |= {
    "attn_norm": with_bias("input_layernorm"),
    "w_o": "attention.dense.weight",
    "b_o": "attention.dense.bias",
    "mlp_norm": with_bias("post_attention_layernorm"),
    "w_up": "mlp.dense_h_to_4h.weight",
    "b_up": "mlp.dense_h_to_4h.bias",
    "w_down": "mlp.dense_4h_to_h.weight",
    "b_down": "mlp.dense_4h_to_h.bias",
}
UNGATED = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu"}


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    bias = fields.flag("attention_bias")
    placement = "parallel" if fields.flag("use_parallel_residual") else "before"
    return {"norm": "layer", "norm_placement": placement, "qkv_bias": bias, "out_bias": bias, "mlp_bias": True}


def write(config: ModelConfig) -> dict[str, Any]:
    parallel = config.norm_placement == "parallel"
    return {"attention_bias": config.qkv_bias, "use_parallel_residual": parallel}


GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    defaults={
        "rms_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    read=read,
    write=write,
    top_names={
        "embed": "gpt_neox.embed_in.weight",
        "final_norm": with_bias("gpt_neox.final_layer_norm"),
        "head": "embed_out.weight",
    },
    layer_names=NAMES,
    layer_prefix="gpt_neox.layers.{}.",
    buffers=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    renamed={r"lm_head\.": "embed_out."},
    fields={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
        "num_key_value_heads": None,
        "head_dim": None,
    },
    mlps=UNGATED,
    write_rope=glm4.write_rope,
)
