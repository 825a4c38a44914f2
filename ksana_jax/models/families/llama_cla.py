"""Llama whose layers share keys and values (Cross-Layer Attention, arXiv:2405.12981): this project's own format.

A model of its own `model_type`, so that no other library loads it as a Llama and draws the missing weights. The field
`kv_layers` has for each layer the one whose keys and values it reads, such as [0, 0, 2, 2]; see `ModelConfig`.
"""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import llama
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    layers = fields.get("kv_layers")
    if not isinstance(layers, list):
        fields.problem("kv_layers", layers, "must list for each layer the one whose keys and values it reads")
        layers = []
    return {"kv_layers": tuple(layers), **llama.read(fields)}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"kv_layers": list(config.kv_layers or range(config.num_layers)), **llama.write(config)}


LLAMA_CLA = Family(
    model_type="llama_cla",
    architectures=("LlamaCLAForCausalLM",),
    defaults=llama.LLAMA.defaults,
    read=read,
    write=write,
    example={"kv_layers": [0, 0, 2, 2, 4, 4, 6, 6]},
)
