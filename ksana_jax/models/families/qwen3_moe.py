"""Qwen3 with experts in each layer (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import qwen3, routing
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    return qwen3.read(fields) | read_experts(fields)


def read_experts(fields: Fields, shared_d_ff: int = 0) -> dict[str, Any]:
    """Returns the experts and their width; layers without experts are refused, and windows, which other layers have
    here than in models without experts."""
    fields.must_be("decoder_sparse_step", (1,), "supported: 1, experts in each layer")
    fields.must_be("mlp_only_layers", ([],), "supported: [], experts in each layer")
    fields.must_be("use_sliding_window", (False,), "supported: false")
    normalised = fields.flag("norm_topk_prob")
    experts = routing.read_experts(fields, "num_experts", normalised=normalised, shared_d_ff=shared_d_ff)
    fields.must_be("num_local_experts", (experts.num_experts,), f"num_experts is {experts.num_experts}")
    return {"experts": experts, "d_ff": fields.integer("moe_intermediate_size")}


def write(config: ModelConfig) -> dict[str, Any]:
    return qwen3.write(config) | write_experts(config)


def write_experts(config: ModelConfig) -> dict[str, Any]:
    return routing.write_experts(config, "num_experts") | {
        "norm_topk_prob": config.experts is not None and config.experts.normalised,
        "moe_intermediate_size": config.d_ff,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
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
    },
    read=read,
    write=write,
    layer_names=routing.NAMES,
    mlps=routing.MLPS,
)
