"""Granite 3 with experts in each layer, which a checkpoint has in stacks."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import granite, mixtral, routing
from ksana_jax.models.families.family import Family, View
from ksana_jax.models.families.fields import Fields

GATE_UP = View("block_sparse_moe.input_linear.weight", ("w_gate_experts", "w_up_experts"))
NAMES = routing.OTHER_NAMES | {
    "w_router": "block_sparse_moe.router.layer.weight",
    "w_gate_experts": GATE_UP,
    "w_up_experts": GATE_UP,
    "w_down_experts": View("block_sparse_moe.output_linear.weight"),
}


def read(fields: Fields) -> dict[str, Any]:
    return granite.read(fields) | {"experts": routing.read_experts(fields, mixtral.NUMBER)}


def write(config: ModelConfig) -> dict[str, Any]:
    return granite.write(config) | routing.write_experts(config, mixtral.NUMBER)


GRANITEMOE = Family(
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    defaults={**granite.GRANITE.defaults, mixtral.NUMBER: 8, "num_experts_per_tok": 2},
    read=read,
    write=write,
    layer_names=NAMES,
    mlps=routing.MLPS,
)
