"""Mixtral: a Mistral whose MLPs are experts (arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import mistral, routing
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import Fields

NAMES = routing.OTHER_NAMES | {
    "w_router": "block_sparse_moe.gate.weight",
    "w_gate_experts": "block_sparse_moe.experts.{}.w1.weight",
    "w_up_experts": "block_sparse_moe.experts.{}.w3.weight",
    "w_down_experts": "block_sparse_moe.experts.{}.w2.weight",
}
NUMBER = "num_local_experts"


def read(fields: Fields) -> dict[str, Any]:
    return mistral.read(fields) | {"experts": routing.read_experts(fields, NUMBER)}


def write(config: ModelConfig) -> dict[str, Any]:
    return mistral.write(config) | routing.write_experts(config, NUMBER)


MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    defaults={
        **mistral.MISTRAL.defaults,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        NUMBER: 8,
        "num_experts_per_tok": 2,
    },
    read=read,
    write=write,
    layer_names=NAMES,
    mlps=routing.MLPS,
)
