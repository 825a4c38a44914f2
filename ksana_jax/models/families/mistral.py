"""Mistral: a Llama whose layers may all have a sliding window (arXiv:2310.06825)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import AttentionPattern, per_layer
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    window = fields.get("sliding_window")
    if window is not None:
        window = fields.integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(k != kind for k in kinds)):
        fields.problem("layer_types", kinds, f"with sliding_window {window} every layer is {kind}")
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, (False,), "supported: false")
    return {"pattern": AttentionPattern(window=window)}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": per_layer(config.pattern, config.num_layers)[0].window}


MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
)
