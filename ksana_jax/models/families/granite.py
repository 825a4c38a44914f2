"""Granite 3: a Llama with factors on its embedding, scores, residuals and logits (arXiv:2405.04324)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import llama
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import Fields

MULTIPLIERS = {
    "embedding_multiplier": "embed_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
}
RANGE = (1e-6, 1e6)


def read(fields: Fields) -> dict[str, Any]:
    return llama.read(fields) | read_factors(fields)


def read_factors(fields: Fields) -> dict[str, Any]:
    found = {ours: fields.number(name, fields.get(name), *RANGE) for name, ours in MULTIPLIERS.items()}
    scaling = fields.number("logits_scaling", fields.get("logits_scaling"), *RANGE)
    return found | {"logit_scale": 1 / scaling}


def write(config: ModelConfig) -> dict[str, Any]:
    return llama.write(config) | {
        "embedding_multiplier": config.embed_scale,
        "attention_multiplier": config.layers[0].attention.scale,
        "residual_multiplier": config.residual_scale,
        # 15 digits, since 1 / (1 / 49) is not 49.
        "logits_scaling": float(f"{1 / config.logit_scale:.15g}"),
    }


GRANITE = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    defaults={"bos_token_id": 1, "eos_token_id": 2, "logits_scaling": 1.0, **dict.fromkeys(MULTIPLIERS, 1.0)},
    read=read,
    write=write,
)
