"""Qwen3 with experts in all layers, or in some (arXiv:2505.09388)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec
from ksana_jax.models.families import qwen3, routing
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import MAX_LAYERS, Fields


def read(fields: Fields) -> dict[str, Any]:
    return qwen3.read(fields) | read_experts(fields)


def read_experts(fields: Fields, shared_d_ff: int = 0) -> dict[str, Any]:
    """Returns the experts and their width; windows are refused, which other layers have here than in models without
    experts."""
    fields.must_be("use_sliding_window", (False,), "supported: false")
    normalised = fields.flag("norm_topk_prob")
    experts = routing.read_experts(fields, "num_experts", normalised=normalised, shared_d_ff=shared_d_ff)
    if plain := read_plain_layers(fields):
        experts = dataclasses.replace(experts, plain_layers=plain, plain_d_ff=fields.integer("intermediate_size"))
    fields.must_be("num_local_experts", (experts.num_experts,), f"num_experts is {experts.num_experts}")
    return {"experts": experts, "d_ff": fields.integer("moe_intermediate_size")}


def read_plain_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the layers without experts: all but every `decoder_sparse_step`-th, and `mlp_only_layers`."""
    step, listed = fields.integer("decoder_sparse_step"), fields.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(checks.integer("layer", layer, 0) for layer in listed):
        fields.problem("mlp_only_layers", listed, "must be a list of layers, counted from 0")
        listed = []
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    return tuple(layer for layer in range(count) if layer in listed or (layer + 1) % step)


def write(config: ModelConfig) -> dict[str, Any]:
    return qwen3.write(config) | write_experts(config)


def write_experts(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts or ExpertsSpec(1, 1)
    plain = {"mlp_only_layers": list(experts.plain_layers), "decoder_sparse_step": 1}
    return routing.write_experts(config, "num_experts") | {
        "norm_topk_prob": config.experts is not None and config.experts.normalised,
        "moe_intermediate_size": config.d_ff,
        **plain,
        **({"intermediate_size": experts.plain_d_ff} if experts.plain_layers else {}),
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    defaults={
        **qwen3.QWEN3.defaults,
        "num_key_value_heads": 4,
        "head_dim": None,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        # transformers writes the second name.
        "num_experts": lambda fields: fields.values.get("num_local_experts", 128),
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    },
    read=read,
    write=write,
    layer_names=routing.NAMES,
    plain_names=routing.PLAIN_NAMES,
    mlps=routing.MLPS,
)
