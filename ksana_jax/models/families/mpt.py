"""MPT: scores fall with distance (ALiBi) instead of a rope, and layer norms have no biases (MosaicML, 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import Family, View, refuse_windows
from ksana_jax.models.families.fields import MAX_HEADS, Fields
from ksana_jax.models.families.rope import read_no_rope

QKV = View("attn.Wqkv.weight", ("w_q", "w_k", "w_v"))
NAMES = dict.fromkeys(QKV.fields, QKV) | {
    "attn_norm": "norm_1.weight",
    "w_o": "attn.out_proj.weight",
    "mlp_norm": "norm_2.weight",
    "w_up": "ffn.up_proj.weight",
    "w_down": "ffn.down_proj.weight",
}
# Supported values in attn_config, where transformers writes general settings too; the last ones are llm-foundry's.
# transformers takes 8 for any alibi_bias_max.
PLAIN = {
    "attn_type": ("multihead_attention",),
    "clip_qkv": (None,),
    "qk_ln": (False,),
    "prefix_lm": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "rope": (False,),
    "qk_gn": (False,),
    "kv_n_heads": (None,),
    "sliding_window_size": (None, -1),
    "attn_logit_softcapping": (None,),
}


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slopes of heads: 2**(-8 / n), 2**(-16 / n), ... for n heads, a power of two; of another number, every
    second one of the next power of two's, then the others (arXiv:2108.12409, section 3)."""
    count = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-8 * i / count) for i in range(1, count + 1)]
    return tuple(slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    fields.must_be("no_bias", (True,), "supported: true")
    fields.must_be("logit_scale", (), "supported: null")
    fields.must_be("norm_type", ("low_precision_layernorm", "layernorm"), "supported: low_precision_layernorm")
    given = fields.get("attn_config") or {}
    if not isinstance(given, Mapping):
        fields.problem("attn_config", given, "must be an object")
        given = {}
    for name, allowed in PLAIN.items():
        if given.get(name, allowed[0]) not in allowed:
            fields.problem(f"attn_config.{name}", given[name], f"supported: {allowed[0]}")
    scale = given.get("softmax_scale")
    return {
        "norm": "layer_no_bias",
        "alibi": alibi_slopes(fields.integer("num_attention_heads", most=MAX_HEADS)),
        "attention_scale": None if scale is None else fields.number("attn_config.softmax_scale", scale),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    attention = {"alibi": True, "softmax_scale": config.attention_scale}
    return {"attn_config": attention, "no_bias": True, "expansion_ratio": config.d_ff // config.d_model}


MPT = Family(
    model_type="mpt",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    defaults={
        "rms_norm_eps": 1e-5,
        "expansion_ratio": 4,
        "intermediate_size": lambda fields: fields.integer("expansion_ratio") * fields.integer("hidden_size"),
        "tie_word_embeddings": True,
    },
    read=read,
    write=write,
    top_names={
        "embed": "transformer.wte.weight",
        "final_norm": "transformer.norm_f.weight",
        "head": "lm_head.weight",
    },
    layer_names=NAMES,
    layer_prefix="transformer.blocks.{}.",
    fields={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
        "intermediate_size": None,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": None,
    },
    mlps={"gelu": "gelu"},
    read_rope=read_no_rope,
    write_rope=lambda config: {},
)
