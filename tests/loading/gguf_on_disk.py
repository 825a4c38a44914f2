"""GGUF twins of small checkpoints: the same config and weights, written as llama.cpp's converter writes them."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec, RopeConfig
from ksana_jax.core.patterns import AttentionPattern
from tests.gguf_writer import write_gguf
from tests.loading.models_on_disk import TINY

_GEMMA: dict[str, Any] = {"mlp": "geglu", "norm": "rms_plus_one", "norm_placement": "both", "embed_scale": 4.0}
_GEMMA |= {"attention_scale": 8**-0.5, "tie_embeddings": True}
_FAR = RopeConfig(theta=1e6)
_SCALES = {"embed_scale": 12.0, "attention_scale": 0.0625, "residual_scale": 0.22, "logit_scale": 0.125}
_NOPE = RopeConfig("none")
_SLIDING = AttentionPattern(window=6)
_EXPERTS: dict[str, Any] = {"mlp": "swiglu_experts", "experts": ExpertsSpec(4, 2)}
# By name: GGUF architecture, config.
TWINS: dict[str, tuple[str, ModelConfig]] = {
    "llama": ("llama", TINY),
    "llama with biases": (
        "llama",
        dataclasses.replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=True),
    ),
    "mistral": ("llama", dataclasses.replace(TINY, family="mistral", pattern=_SLIDING)),
    "qwen2": ("qwen2", dataclasses.replace(TINY, family="qwen2", qkv_bias=True, norm_eps=1e-6, eos_ids=(2, 3))),
    "qwen3": ("qwen3", dataclasses.replace(TINY, family="qwen3", qk_norm="head", head_dim=12, rope=_FAR)),
    "gemma": (
        "gemma",
        dataclasses.replace(TINY, **_GEMMA | {"norm_placement": "before", "attention_scale": None}, family="gemma"),
    ),
    "gemma2": (
        "gemma2",
        dataclasses.replace(
            TINY, **_GEMMA, family="gemma2", num_layers=3, pattern=(_SLIDING, AttentionPattern(), _SLIDING),
            soft_cap=50.0, logit_soft_cap=30.0,
        ),
    ),
    "gemma3": (
        "gemma3",
        dataclasses.replace(
            TINY, **_GEMMA, family="gemma3_text", qk_norm="head", num_layers=7,
            pattern=(*[_SLIDING] * 5, AttentionPattern(), _SLIDING),
            rope=(*[RopeConfig()] * 5, RopeConfig("linear", 1e6, 8.0), RopeConfig()),
        ),
    ),
    "olmo2": (
        "olmo2", dataclasses.replace(TINY, family="olmo2", norm_placement="after", qk_norm="projection", rope=_FAR),
    ),
    # llama.cpp has no key for the layers without a rope: every fourth one.
    "smollm3": ("smollm3", dataclasses.replace(TINY, family="smollm3", num_layers=4, rope=(*[_FAR] * 3, _NOPE))),
    "granite": ("granite", dataclasses.replace(TINY, family="granite", **_SCALES, tie_embeddings=True)),
    "glm4": (
        "glm4",
        dataclasses.replace(
            TINY, family="glm4", head_dim=8, norm_placement="both", qkv_bias=True,
            rope=RopeConfig(partial_rotary_factor=0.5),
        ),
    ),
    "phi3": (
        "phi3",
        dataclasses.replace(
            TINY, family="phi3", pattern=_SLIDING, rope=RopeConfig(
                "longrope", 1e4, 2.0, TINY.max_position // 2, attention_factor=1.25, factors=(1.0, 2.5),
                short_factors=(1.0, 1.5), partial_rotary_factor=0.5,
            ),
        ),
    ),
    "mixtral": ("llama", dataclasses.replace(TINY, **_EXPERTS, family="mixtral", rope=_FAR)),
    "qwen3_moe": ("qwen3moe", dataclasses.replace(TINY, **_EXPERTS, family="qwen3_moe", qk_norm="head")),
    "qwen2_moe": (
        "qwen2moe",
        dataclasses.replace(
            TINY, family="qwen2_moe", mlp="swiglu_experts", qkv_bias=True,
            experts=ExpertsSpec(4, 2, normalised=False, shared_d_ff=64),
        ),
    ),
    "olmoe": (
        "olmoe",
        dataclasses.replace(
            TINY, family="olmoe", mlp="swiglu_experts", experts=ExpertsSpec(4, 2, normalised=False),
            qk_norm="projection",
        ),
    ),
    "olmo3": (
        "olmo2",
        dataclasses.replace(
            TINY, family="olmo3", norm_placement="after", qk_norm="projection", num_layers=4,
            pattern=(*[_SLIDING] * 3, AttentionPattern()),
            rope=(*[RopeConfig(theta=5e5)] * 3, RopeConfig("linear", 5e5, 8.0)),
        ),
    ),
}  # fmt: skip
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "experts.gate_proj": "ffn_gate_exps",
    "experts.w1": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
    "experts.w3": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "experts.w2": "ffn_down_exps",
    "self_attn.qkv_proj": "attn_qkv",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, after: bool = False) -> str:
    """The GGUF name of a Hugging Face tensor. after: whether outputs are normalised, which gives norms other names."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    own = {"post_attention_layernorm": "post_attention_norm" if after else "ffn_norm"}
    own |= {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    return f"blk.{layer}.{(_NAMES | own)[module]}.{kind}"


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of heads, or a bias, in the order in which the converter stores them for the architecture llama."""
    size = len(values) // num_heads
    halves = values.reshape(num_heads, 2, size // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors with the experts of a layer in one: layers.0.experts.w1 of layers.0.block_sparse_moe.experts.3.w1."""
    found, experts = {}, {}
    for name, values in tensors.items():
        if (parts := re.fullmatch(r"(.*layers\.\d+\.).*(experts)\.(\d+)(\..*)", name)) is None:
            found[name] = values
        else:
            experts.setdefault(f"{parts[1]}{parts[2]}{parts[4]}", {})[int(parts[3])] = values
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def gguf_tensors(architecture: str, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under GGUF names, as the converter stores them: norms in float32, Gemma's plus one."""
    found = {}
    for name, values in stacked(tensors).items():
        if values.ndim == 1:
            values = values.astype(np.float32)
        if architecture in ("llama", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if "shared_expert_gate" in name:
            values = values[0].astype(np.float32)
        found[gguf_name(name, config.norm_placement != "before" and architecture != "glm4")] = values
    if architecture == "phi3":
        [rope] = {layer.attention.rope for layer in config.layers}
        found["rope_factors_long.weight"] = np.array(rope.factors, np.float32)
        found["rope_factors_short.weight"] = np.array(rope.short_factors, np.float32)
    return found


def gguf_metadata(architecture: str, config: ModelConfig, **changes: Any) -> dict[str, Any]:
    """Metadata of a config, with changes by key without the architecture; None leaves a key out."""
    ropes = config.rope if isinstance(config.rope, tuple) else (config.rope,)
    ropes = tuple(rope for rope in ropes if rope.kind != "none")
    full = next((rope for rope in ropes if rope.kind != "default"), ropes[0])
    patterns = config.pattern if isinstance(config.pattern, tuple) else (config.pattern,)
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": full.theta,
        "rope.dimension_count": None if full.partial_rotary_factor == 1 else full.dims(config.head_dim),
        "rope.scaling.type": None if full.kind == "default" else full.kind,
        "rope.scaling.factor": None if full.kind == "default" else full.factor,
        "attention.sliding_window": max(p.window or 0 for p in patterns) or None,
        "attn_logit_softcapping": config.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }
    if (experts := config.experts) is not None:
        values |= {"expert_count": experts.num_experts, "expert_used_count": experts.num_chosen}
        if architecture.startswith("qwen"):
            values |= {"expert_feed_forward_length": config.d_ff, "feed_forward_length": 7 * config.d_ff}
            values["expert_shared_feed_forward_length"] = experts.shared_d_ff or None
    if architecture == "granite":
        values |= {
            "embedding_scale": config.embed_scale,
            "attention.scale": config.attention_scale,
            "residual_scale": config.residual_scale,
            "logit_scale": 1 / config.logit_scale,
        }
    if full.kind == "longrope":
        values |= dict.fromkeys(("rope.scaling.type", "rope.scaling.factor"))
        values |= {
            "rope.scaling.original_context_length": full.original_max_len,
            "rope.scaling.attn_factor": full.attention_factor,
        }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    ids = dict(zip(("eos", "eot", "eom"), config.eos_ids)) | {"bos": config.bos_id}
    named = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    tokens = {"tokenizer.ggml.tokens": [f"<{i}>" for i in range(config.vocab_size)]}
    tokens |= {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()}
    return {"general.architecture": architecture, **named, **tokens}


def write_twin(
    path: Path, architecture: str, config: ModelConfig, tensors: Mapping[str, np.ndarray], **changes: Any
) -> Path:
    """A GGUF file with the config and weights of a checkpoint."""
    return write_gguf(path, gguf_metadata(architecture, config, **changes), gguf_tensors(architecture, config, tensors))
