"""Falcon: a tensor holds the queries of each kv head with its key and value, and attention and MLP read the same hidden
states, by one layer norm or by two; in the RW models one follows the other, and scores fall with distance instead of a
rope (arXiv:2311.16867).

With ALiBi, transformers rounds the biases to bfloat16, beyond 256 positions too; here they are exact.
"""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, RopeConfig
from ksana_jax.models.families.family import Family, View, refuse_windows, with_bias
from ksana_jax.models.families.fields import MAX_HEADS, Fields
from ksana_jax.models.families.gpt_neox import UNGATED
from ksana_jax.models.families.mpt import alibi_slopes
from ksana_jax.models.families.rope import read_rope, rope_fields

QKV = View("self_attention.query_key_value.weight", ("w_q", "w_k", "w_v"), "num_kv_heads")
QKV_BIAS = View("self_attention.query_key_value.bias", ("b_q", "b_k", "b_v"), "num_kv_heads")
NAMES = dict.fromkeys(QKV.fields, QKV) | dict.fromkeys(QKV_BIAS.fields, QKV_BIAS)
NAMES |= {
    "attn_norm": with_bias("input_layernorm"),
    "w_o": "self_attention.dense.weight",
    "b_o": "self_attention.dense.bias",
    "mlp_norm": with_bias("post_attention_layernorm"),
    "w_up": "mlp.dense_h_to_4h.weight",
    "b_up": "mlp.dense_h_to_4h.bias",
    "w_down": "mlp.dense_4h_to_h.weight",
    "b_down": "mlp.dense_4h_to_h.bias",
}


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    num_heads, bias = fields.integer("num_attention_heads", most=MAX_HEADS), fields.flag("bias")
    grouped, parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn")
    found = {"norm": "layer", "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    if grouped:
        fields.must_be("parallel_attn", (True,), "supported with new_decoder_architecture: true")
        fields.must_be("num_ln_in_parallel_attn", (1, 2), "supported: 1, 2")
        found["norm_placement"] = "parallel_shared" if fields.get("num_ln_in_parallel_attn") == 1 else "parallel"
    else:
        fields.must_be("num_ln_in_parallel_attn", (1,), "supported: 2 with new_decoder_architecture")
        found["norm_placement"] = "parallel_shared" if parallel else "before"
        found["num_kv_heads"] = 1 if fields.flag("multi_query") else num_heads
    if fields.flag("alibi"):
        # transformers adds the biases before it scales the scores.
        scale = max(fields.integer("hidden_size") // num_heads, 1) ** -0.5
        found["alibi"] = tuple(slope * scale for slope in alibi_slopes(num_heads))
    return found


def write(config: ModelConfig) -> dict[str, Any]:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    grouped = config.norm_placement == "parallel" or 1 < kv_heads < heads
    return {
        "alibi": config.alibi is not None,
        "bias": config.qkv_bias,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if config.norm_placement == "parallel" else 1,
        "parallel_attn": config.norm_placement != "before",
    }


def read_rope_or_none(fields: Fields, max_position: int) -> RopeConfig:
    return NO_ROPE if fields.flag("alibi") else read_rope(fields, max_position)


def write_rope(config: ModelConfig) -> dict[str, Any]:
    rope = config.layers[0].attention.rope
    return {} if rope == NO_ROPE else rope_fields(rope)


FALCON = Family(
    model_type="falcon",
    architectures=("FalconForCausalLM",),
    defaults={
        "rms_norm_eps": 1e-5,
        "intermediate_size": lambda fields: 4 * fields.integer("hidden_size"),
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
        "max_position_embeddings": 2048,
    },
    read=read,
    write=write,
    top_names={
        "embed": "transformer.word_embeddings.weight",
        "final_norm": with_bias("transformer.ln_f"),
        "head": "lm_head.weight",
    },
    layer_names=NAMES,
    norm_names={"parallel": {"attn_norm": with_bias("ln_attn"), "mlp_norm": with_bias("ln_mlp")}},
    layer_prefix="transformer.h.{}.",
    buffers=r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",
    fields={
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "head_dim": None,
    },
    activation="activation",
    mlps=UNGATED,
    read_rope=read_rope_or_none,
    write_rope=write_rope,
)
