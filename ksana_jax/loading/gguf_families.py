"""Config fields of families whose GGUF files differ from a Llama's in more than numbers. Knows no files.

Source: llama.cpp (hyperparameters of its architectures, conversion of these families).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from ksana_jax.models.families import FAMILIES

EPS = "attention.layer_norm_epsilon"
LAYER_NORMS = ("gptneox", "falcon", "mpt", "gpt2", "stablelm", "command-r", "cohere2")
# In these, configs of Hugging Face have other names for usual fields.
OWN_NAMES = ("gpt_neox", "falcon", "mpt", "gpt2", "stablelm", "cohere", "cohere2")
# That the functions below take out.
KEYS = ("use_parallel_residual", "attention.max_alibi_bias", "attention.clamp_kqv", "logit_scale")
QKV_BIAS = "blk.0.attn_qkv.bias"
Values = dict[str, Any]


def in_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config fields under the names of their family, without those that it lacks and that say nothing new."""
    if values["model_type"] not in OWN_NAMES:
        return dict(values)
    heads, named = values["num_attention_heads"], FAMILIES[values["model_type"]].fields
    implied = {"num_key_value_heads": heads, "head_dim": values["hidden_size"] // heads}
    if "expansion_ratio" in values:
        implied["intermediate_size"] = values["expansion_ratio"] * values["hidden_size"]
    kept = {name: value for name, value in values.items() if named.get(name, name) or implied.get(name) != value}
    return {named.get(name) or name: value for name, value in kept.items()}


def _gpt_neox(fields: Values, keys: Values, tensors: Container[str]) -> Values:
    return {
        "use_parallel_residual": keys.pop("use_parallel_residual", True),
        "attention_bias": QKV_BIAS in tensors,
    }


def _falcon(fields: Values, keys: Values, tensors: Container[str]) -> Values:
    two_norms, kv_heads = "blk.0.attn_norm_2.weight" in tensors, fields["num_key_value_heads"]
    is_new = two_norms or 1 < kv_heads < fields["num_attention_heads"]
    norms = {"num_ln_in_parallel_attn": 1 + two_norms} if is_new else {}
    return {"new_decoder_architecture": is_new, "multi_query": kv_heads == 1, "bias": QKV_BIAS in tensors, **norms}


def _without_rope(fields: Values, keys: Values, tensors: Container[str]) -> Values:
    for name in ("rope_theta", "rope_scaling"):
        fields.pop(name)
    return {}


def _mpt(fields: Values, keys: Values, tensors: Container[str]) -> Values:
    _without_rope(fields, keys, tensors)
    attention = {"alibi_bias_max": keys.pop("attention.max_alibi_bias", 0), "clip_qkv": None}
    if clip := keys.pop("attention.clamp_kqv", 0):
        attention["clip_qkv"] = clip
    ratio = max(fields["intermediate_size"] // fields["hidden_size"], 1)
    return {"attn_config": attention, "expansion_ratio": ratio, "no_bias": QKV_BIAS not in tensors}


def _stablelm(fields: Values, keys: Values, tensors: Container[str]) -> Values:
    keys.pop("use_parallel_residual", None)  # converters write true in any case; llama.cpp asks for the norm
    parallel = "blk.0.ffn_norm.weight" not in tensors
    return {"use_qkv_bias": "blk.0.attn_q.bias" in tensors, "use_parallel_residual": parallel}


def _cohere(fields: Values, keys: Values, tensors: Container[str]) -> Values:
    return {"logit_scale": keys.pop("logit_scale")} if "logit_scale" in keys else {"logit_scale": 1.0}


def _gpt_oss(fields: Values, keys: Values, tensors: Container[str]) -> Values:
    found = {"intermediate_size": fields.pop("moe_intermediate_size", None)}
    if fields["rope_scaling"]:
        return found | {"rope_scaling": fields["rope_scaling"] | {"truncate": False}}
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    return found | {"rope_parameters": rope}


# (config fields so far, keys without the architecture, names of tensors) -> further fields; known keys are taken out.
OWN: dict[str, Callable[[Values, Values, Container[str]], Values]] = {
    "gptneox": _gpt_neox,
    "falcon": _falcon,
    "mpt": _mpt,
    "gpt2": _without_rope,
    "stablelm": _stablelm,
    "command-r": _cohere,
    "cohere2": _cohere,
    "gpt-oss": _gpt_oss,
}
