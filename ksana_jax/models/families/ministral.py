"""Ministral: a Mistral in which only some layers have the window. Ministral 3: one with YaRN, whose queries also grow
with the logarithm of the position (Mistral AI, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.families import mistral
from ksana_jax.models.families.family import Family, layer_kinds, sliding_in, write_windows
from ksana_jax.models.families.fields import MAX_LAYERS, Fields
from ksana_jax.models.families.rope import read_form, read_rope, rope_fields

BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384, "mscale": 1.0, "mscale_all_dim": 1.0}
ROPE |= {BETA: 0.1}
# Entries of a rope that other families have not.
OWN = (BETA, "max_position_embeddings")


def read(fields: Fields) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, (False,), "supported: false")
    kind = "full_attention" if fields.get("sliding_window") is None else "sliding_attention"
    kinds = layer_kinds(fields, [kind] * fields.integer("num_hidden_layers", most=MAX_LAYERS))
    return {"pattern": sliding_in(fields, kinds)}


def read3(fields: Fields) -> dict[str, Any]:
    return mistral.read(fields) | read_growth(fields)


def read_growth(fields: Fields) -> dict[str, Any]:
    rope = fields.get("rope_parameters")
    beta = rope.get(BETA) if isinstance(rope, Mapping) else None
    if not beta:
        return {}
    length = rope.get(ORIGINAL)
    if problem := checks.integer(f"rope_parameters.{ORIGINAL}", length):
        fields.problems.append(problem)
    return {"query_growth": (fields.number(f"rope_parameters.{BETA}", beta), length)}


def read_ropes(fields: Fields, max_position: int, implied: Mapping[str, float] = MappingProxyType({})) -> RopeConfig:
    """Reads the rope from rope_parameters; implied: further entries, which may have these values only."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return read_rope(fields, max_position)
    for name, value in implied.items():
        if rope.get(name) not in (None, value):
            fields.problem(f"rope_parameters.{name}", rope[name], f"supported: {value}")
    kept = {name: value for name, value in rope.items() if name not in (*OWN, *implied)}
    return read_form(fields, "rope_parameters", kept, max_position)


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    written = rope_fields(config.layers[0].attention.rope)
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    grows = {BETA: config.query_growth[0]} if config.query_growth else {}
    return {"rope_parameters": scaling | {"rope_theta": written["rope_theta"]} | grows}


MINISTRAL = Family(
    model_type="ministral",
    architectures=("MinistralForCausalLM",),
    defaults=mistral.MISTRAL.defaults,
    read=read,
    write=write_windows,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architectures=("Ministral3ForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": lambda fields: None if fields.get("rope_scaling") else ROPE,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read3,
    write=mistral.write,
    read_rope=read_ropes,
    write_rope=write_ropes,
)
