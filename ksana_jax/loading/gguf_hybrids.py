"""GGUF files of models with recurrent layers: keys, names of tensors, and what converters change. Knows no files.

Converters write -exp(A_log) for A_log, drop dimensions of 1, and in files of Qwen3.5 have heads of values in another
order: those that share a head of keys are as many heads apart as there are heads of keys, and not neighbours.
Source: llama.cpp (conversion of these families, hyperparameters of its architectures).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec
from ksana_jax.loading import gguf_families
from ksana_jax.models.families.fields import MAX_LAYERS

Values = dict[str, Any]
# Families by architecture.
HYBRIDS = {"lfm2": "lfm2", "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
HYBRIDS |= {"granitehybrid": "granitemoehybrid", "kimi-linear": "kimi_linear"}
TILED = ("qwen3_5_text", "qwen3_5_moe_text")
# Fields of a recurrent layer by the name of the tensor that has their rows, one after the other.
_OF_HEADS = {"ssm_a": ("log_decay",), "ssm_dt.bias": ("b_decay",), "ssm_norm.weight": ("delta_norm",)}
_QWEN = {
    **_OF_HEADS,
    "ssm_in.weight": ("w_q", "w_k", "w_v", "w_out_gate"),  # of older converters, instead of the next two
    "attn_qkv.weight": ("w_q", "w_k", "w_v"),
    "attn_gate.weight": ("w_out_gate",),
    "ssm_conv1d.weight": ("w_conv_q", "w_conv_k", "w_conv_v"),
    "ssm_out.weight": ("w_o",),
}
_LFM2 = {"in_proj": ("w_in_b", "w_in_c", "w_in_x"), "conv": ("w_conv",), "out_proj": ("w_o",)}
_GRANITE = {
    **_OF_HEADS,
    "ssm_in.weight": ("w_out_gate", "w_v", "w_k", "w_q", "w_decay"),
    "ssm_conv1d.weight": ("w_conv_v", "w_conv_k", "w_conv_q"),
    "ssm_conv1d.bias": ("b_conv_v", "b_conv_k", "b_conv_q"),
    "ssm_norm.weight": ("mamba_norm",),
    "ssm_d": ("skip",),
    "ssm_out.weight": ("w_o",),
}
_KIMI = {f"attn_{part}": f"w_{part}" for part in "qkv"} | {f"ssm_conv1d_{part}": f"w_conv_{part}" for part in "qkv"}
_KIMI |= {"ssm_f_a": "w_decay_a", "ssm_f_b": "w_decay", "ssm_g_a": "w_out_gate_a", "ssm_g_b": "w_out_gate"}
_KIMI |= {"ssm_beta": "w_beta", "attn_output": "w_o"}
RECURRENT: dict[str, dict[str, tuple[str, ...]]] = {
    "lfm2": {f"shortconv.{name}.weight": fields for name, fields in _LFM2.items()},
    "qwen3_next": _QWEN | {"ssm_ba.weight": ("w_beta", "w_decay")},
    **dict.fromkeys(TILED, _QWEN | {"ssm_beta.weight": ("w_beta",), "ssm_alpha.weight": ("w_decay",)}),
    "granitemoehybrid": _GRANITE,
    "kimi_linear": _OF_HEADS | {f"{name}.weight": (field,) for name, field in _KIMI.items()},
}
# Tensors that have the rows of several fields group by group, as checkpoints of Hugging Face do.
GROUPED = ("attn_q.weight", "ssm_ba.weight", "ssm_in.weight")
_KV_HEADS, _BLOCKS, GUESSING = "attention.head_count_kv", "block_count", "nextn_predict_layers"
_LAYERS, _INTERVAL, _ROPE = "attention.recurrent_layers", "full_attention_interval", "rope.scaling.finetuned"
_KDA = {"linear_key_head_dim": "kda.head_dim", "linear_conv_kernel_dim": "ssm.conv_kernel"}
_SSM = [f"ssm.{name}" for name in ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")]
_SHARED, _WIDTH, _SECTIONS = "expert_shared_feed_forward_length", "feed_forward_length", "rope.dimension_sections"


def take_layers(keys: Values) -> list[bool]:
    """Returns which layers are recurrent, and leaves the keys as those of a model in which each layer attends; layers
    that guess further tokens are not counted."""
    extra, total = keys.get(GUESSING, 0), keys.get(_BLOCKS, 0)
    if checks.integer(_BLOCKS, total, 1, MAX_LAYERS) or checks.integer(GUESSING, extra, 0, total - 1):
        return []  # and the value is refused
    num_layers = keys[_BLOCKS] = total - keys.pop(GUESSING, 0)
    given, each, heads = keys.pop(_LAYERS, None), keys.pop(_INTERVAL, 4), keys.get(_KV_HEADS)
    keys.setdefault(_WIDTH, keys.get("expert_feed_forward_length"))
    if isinstance(heads, np.ndarray):
        if len({*heads.tolist()} - {0}) == 1 and len(heads) == num_layers:
            keys[_KV_HEADS] = int(heads.max())
        return (heads == 0).tolist()
    if isinstance(given, np.ndarray):
        return given[:num_layers].astype(bool).tolist()
    each = each if checks.integer(_INTERVAL, each, 1) is None else 1
    return [(layer + 1) % each != 0 for layer in range(num_layers)]


def read(fields: Values, keys: Values, recurrent: list[bool], tensors: Iterable[str]) -> Values:
    """Returns further fields of a config and takes their keys out; a problem is a value that families refuse.

    Args:
      fields: of the config so far. keys: without the architecture. tensors: names.
    """
    family = fields["model_type"]
    kinds = {"lfm2": ("full_attention", "conv"), "granitemoehybrid": ("attention", "mamba")}
    attends, other = kinds.get(family, ("full_attention", "linear_attention"))
    found: Values = {"layer_types": [other if own else attends for own in recurrent]}
    if family == "lfm2":
        return found | {"conv_L_cache": keys.pop("shortconv.l_cache", None), "block_auto_adjust_ff_dim": False}
    if family == "kimi_linear":
        found |= {"rope_theta": None, "rope_scaling": None}
        found |= {"linear_num_key_heads": fields["num_attention_heads"], "norm_topk_prob": True}
        return found | {name: keys.pop(key, None) for name, key in _KDA.items()}
    groups, heads, size, inner, kernel = (keys.pop(name, None) for name in _SSM)
    whole = checks.integer("", heads, 1) is None and checks.integer("", inner, 1) is None and inner % heads == 0
    prefix, names = "linear_", ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    if family == "granitemoehybrid":
        prefix, names = "mamba_", ("n_groups", "n_heads", "d_state", "d_head", "d_conv")
    values = groups, heads, size, inner // heads if whole else None, kernel
    found |= {f"{prefix}{name}": value for name, value in zip(names, values, strict=True)}
    if family != "granitemoehybrid":
        keys.pop(_SECTIONS, None)  # positions of text are the same in each section
        return found
    found["mamba_conv_bias"] = any(name.endswith("ssm_conv1d.bias") for name in tensors)
    found["mamba_expand"] = inner // fields["hidden_size"] if whole else None
    num_experts, shared = fields.get("num_local_experts", 0), keys.pop(_SHARED, None)
    shared = fields.pop("shared_expert_intermediate_size", shared)
    found |= {"num_local_experts": num_experts, "position_embedding_type": "rope" if keys.get(_ROPE, True) else "nope"}
    return found | {"shared_intermediate_size": shared if num_experts else fields["intermediate_size"]}


def keys_of(config: ModelConfig) -> Values:
    """Returns the keys that a model with latents or recurrent layers has beyond those of others, without the
    architecture."""
    spec, family = config.recurrent, config.family
    if spec is None:
        return {} if config.latent is None else gguf_families.latent_keys(config)
    is_own = [layer in spec.layers for layer in range(config.num_layers)]
    kv_heads = {_KV_HEADS: np.array([0 if own else config.num_kv_heads for own in is_own], np.int32)}
    if not isinstance(spec, (DeltaRuleSpec, Mamba2Spec)):
        return kv_heads | {"shortconv.l_cache": spec.kernel}
    sizes = spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.num_value_heads * spec.value_dim, spec.kernel
    if family == "kimi_linear":
        sizes = dict(zip(_KDA.values(), (spec.key_dim, spec.kernel), strict=True))
        return kv_heads | sizes | gguf_families.latent_keys(config)
    found: Values = dict(zip(_SSM, sizes, strict=True))
    if isinstance(spec, Mamba2Spec):
        shared = {} if config.experts is None else {_SHARED: config.experts.shared_d_ff}
        scales = {"embedding_scale": config.embed_scale, "attention.scale": config.layers[0].attention.scale}
        scales |= {"residual_scale": config.residual_scale, "logit_scale": 1 / config.logit_scale}
        return kv_heads | found | shared | scales | {_ROPE: config.layers[0].attention.rope != NO_ROPE}
    half = config.layers[0].attention.rope.dims(config.head_dim) // 2
    sections = np.array([*((half + more) // 3 for more in (2, 1, 0)), 0], np.int32)  # of time, height and width
    return found | ({_SECTIONS: sections} if family in TILED else {}) | {_LAYERS: np.array(is_own)}


def without_guessing(metadata: Mapping[str, Any], architecture: str, config: ModelConfig) -> Values:
    """Returns metadata without layers that guess further tokens, whose tensors are not read."""
    found = {key: x for key, x in metadata.items() if key != f"{architecture}.{GUESSING}"}
    found |= {f"{architecture}.{_BLOCKS}": config.num_layers}
    return {key: x[: config.num_layers] if key == f"{architecture}.{_LAYERS}" else x for key, x in found.items()}


def stored_shape(config: ModelConfig, name: str, shape: tuple[int, ...], recurrent: bool) -> tuple[int, ...]:
    """Returns the shape in which files have a tensor. name: without the layer. recurrent: True if the layer is."""
    spec, latent = config.recurrent, config.latent
    if name == "ffn_gate_inp_shexp.weight":
        return shape[1:]
    if latent is not None and name in ("attn_k_b.weight", "attn_v_b.weight"):
        sizes = (latent.rank, latent.plain) if name.startswith("attn_k") else (latent.value, latent.rank)
        return config.num_heads, *sizes
    if recurrent and "conv" in name and len(shape) == 3:
        return (1, shape[0], 1, shape[2]) if name.startswith("ssm_conv1d_") else (shape[0], shape[2])
    if name == "ssm_a" and config.family == "kimi_linear":
        return 1, 1, *shape, 1
    if isinstance(spec, Mamba2Spec) and name in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        return (spec.num_key_heads, shape[0] // spec.num_key_heads) if name.startswith("ssm_norm") else (*shape, 1)
    return shape


def row_order(sizes: Mapping[str, int], spec: DeltaRuleSpec) -> np.ndarray:
    """Returns where files of `TILED` families have the rows of a checkpoint. sizes: number of rows by field, one field
    after the other."""
    heads = np.arange(spec.num_value_heads).reshape(-1, spec.num_key_heads).T
    found, start = [], 0
    for field, size in sizes.items():
        rows = np.arange(size)
        if field not in ("w_q", "w_k", "w_conv_q", "w_conv_k", "delta_norm"):
            rows = rows.reshape(spec.num_value_heads, -1)[heads.reshape(-1)].reshape(-1)
        found.append(start + rows)
        start += size
    return np.concatenate(found)
