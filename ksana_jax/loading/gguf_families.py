"""Config fields of families whose GGUF files differ from a Llama's in more than numbers. Knows no files.

Source: llama.cpp (hyperparameters of its architectures, conversion of these families).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.families import FAMILIES

EPS = "attention.layer_norm_epsilon"
LAYER_NORMS = ("gptneox", "falcon", "mpt", "gpt2", "stablelm", "command-r", "cohere2")
# In these, configs of Hugging Face have other names for usual fields.
OWN_NAMES = ("gpt_neox", "falcon", "mpt", "gpt2", "stablelm", "cohere", "cohere2", "lfm2", "kimi_linear")
# That the functions below take out.
KEYS = ("use_parallel_residual", "attention.max_alibi_bias", "attention.clamp_kqv", "logit_scale")
_KEY, _VALUE, _KV_HEADS = "attention.key_length", "attention.value_length", "attention.head_count_kv"
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


def _taken(keys: Values) -> Callable[..., Any]:
    """Returns a function that takes a key out and returns its value, which must be a single number."""

    def taken(key: str, default: Any = None) -> Any:
        value = keys.pop(key, default)
        if isinstance(value, (str, list, np.ndarray)):
            raise ConfigError(f"{key} is {value!r:.60}; supported: a number")
        return value

    return taken


def _minicpm3(keys: Values, fields: Values, tensors: Mapping[str, Any]) -> Values:
    """Returns the fields of a MiniCPM3 and takes its keys out. Files have heads by definition."""
    taken = _taken(keys)
    named = {"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"}
    named |= {"rope.dimension_count": "qk_rope_head_dim", _KEY: "qk_nope_head_dim"}
    if missing := [key for key in named if not keys.get(key)]:
        raise ConfigError(f"minicpm3.{missing[0]} is missing; every model has it")
    found = {name: int(taken(key)) for key, name in named.items()}
    found["qk_nope_head_dim"] -= found["qk_rope_head_dim"]
    # llama.cpp has these in its code, and no keys for them.
    return found | {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}


def _deepseek2(keys: Values, fields: Values, tensors: Mapping[str, Any]) -> Values:
    """Returns the fields of a model with latents and takes its keys out; a problem is a value that families refuse.

    Files have heads as attention to latents has them, and next to them widths of heads by definition.
    """
    taken = _taken(keys)
    rank, rotated, value = taken("attention.kv_lora_rank"), taken("rope.dimension_count"), taken(f"{_VALUE}_mla")
    width = taken(f"{_KEY}_mla")
    of_heads = taken(_KEY), taken(_VALUE), taken(_KV_HEADS)
    hybrid = fields["model_type"] == "kimi_linear"  # whose converter leaves value_length as in the config
    wanted = None if None in (rank, rotated, value, width) else (rank + rotated, of_heads[1] if hybrid else rank, 1)
    if of_heads != wanted:
        raise ConfigError(
            f"heads are not of latents: older converters of llama.cpp wrote them expanded ({_KEY}_mla is {width}, "
            f"{_KEY}, {_VALUE} and {_KV_HEADS} are {of_heads}); convert the model again"
        )
    found: Values = {"model_type": "youtu", "num_key_value_heads": fields["num_attention_heads"]}
    found |= {"kv_lora_rank": int(rank), "qk_rope_head_dim": int(rotated), "v_head_dim": int(value)}
    found |= {"qk_nope_head_dim": int(width) - int(rotated), "q_lora_rank": taken("attention.q_lora_rank")}
    names = {"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok"}
    names |= {"expert_shared_count": "n_shared_experts", "expert_feed_forward_length": "moe_intermediate_size"}
    experts = {name: taken(key) for key, name in names.items()}
    experts |= {"first_k_dense_replace": taken("leading_dense_block_count", 0)}
    experts |= {"routed_scaling_factor": taken("expert_weights_scale", 1.0)}
    experts |= {"norm_topk_prob": bool(taken("expert_weights_norm", False))}
    groups = {"n_group": taken("expert_group_count", 1), "topk_group": taken("expert_group_used_count", 1)}
    gating = taken("expert_gating_func", 2 if any(name.endswith("exp_probs_b.bias") for name in tensors) else 1)
    if not experts["n_routed_experts"]:
        return found
    if gating not in (1, 2):
        raise ConfigError(f"expert_gating_func is {gating}; supported: 1 (softmax), 2 (sigmoid)")
    kind = "deepseek_v2" if gating == 1 else "deepseek_v3"
    method = {"topk_method": "greedy" if groups["n_group"] == 1 else "group_limited_greedy"} if gating == 1 else {}
    if hybrid:
        kind, method = fields["model_type"], {"moe_router_activation_func": ("softmax", "sigmoid")[gating - 1]}
    return found | {"model_type": kind} | experts | groups | method


def latent_keys(config: ModelConfig) -> Values:
    """Returns the keys of latents and their experts, without the architecture."""
    latent, experts = config.latent, config.experts
    assert latent is not None
    found: Values = {"attention.kv_lora_rank": latent.rank, _VALUE: latent.rank, "rope.dimension_count": latent.rotated}
    found |= {} if latent.query_rank is None else {"attention.q_lora_rank": latent.query_rank}
    found |= {f"{_KEY}_mla": latent.plain + latent.rotated, f"{_VALUE}_mla": latent.value}
    if isinstance(config.rope, RopeConfig) and config.rope.mscale_all_dim:
        found["rope.scaling.yarn_log_multiplier"] = config.rope.mscale_all_dim / 10
    if experts is None:  # llama.cpp asks for these all the same
        none = {"expert_feed_forward_length": config.d_ff, "expert_shared_count": 0}
        return found | none | {"leading_dense_block_count": config.num_layers}
    return found | {
        "feed_forward_length": experts.plain_d_ff or config.d_ff,
        "expert_feed_forward_length": config.d_ff,
        "expert_shared_count": experts.shared_d_ff // config.d_ff,
        "leading_dense_block_count": len(experts.plain_layers),
        "expert_weights_scale": experts.factor,
        "expert_weights_norm": experts.normalised,
        "expert_group_count": experts.num_groups,
        "expert_group_used_count": experts.groups_chosen,
        "expert_gating_func": 2 if experts.scoring == "sigmoid" else 1,
    }


# (keys without the architecture, config fields so far, tensors) -> fields; known keys are taken out.
LATENTS: dict[str, Callable[[Values, Values, Mapping[str, Any]], Values]] = {
    "deepseek2": _deepseek2,
    "kimi-linear": _deepseek2,
    "minicpm3": _minicpm3,
}


def with_mscale(scaling: Values, multiplier: Any) -> Values:
    """Returns a rope's scaling with YaRN's factor of scores.

    Converters to deepseek2 write a tenth of `mscale_all_dim`, those of other architectures the number itself.
    """
    if problem := checks.number("rope.scaling.yarn_log_multiplier", multiplier, above=0, high=0.2):
        raise ConfigError(f"{problem}: a tenth of mscale_all_dim")
    mscale = round(10 * float(multiplier), 6)
    return scaling | {"mscale": mscale, "mscale_all_dim": mscale}


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
