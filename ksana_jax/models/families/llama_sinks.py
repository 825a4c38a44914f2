"""Llama with a sink logit per attention head: this project's own format, because transformers has no such dense model.

A model of its own `model_type`, so that no other library loads it as a Llama and silently drops the logits. The field
`attention_sinks` is "learned" (gpt-oss, arXiv:2508.10925; its name of the weight) or "zero" (softmax-off-by-one,
arXiv:2309.17453, section 3.3).
"""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import llama
from ksana_jax.models.families.family import LAYER_NAMES, Family
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    kind = fields.get("attention_sinks")
    if kind not in ("learned", "zero"):
        fields.problem("attention_sinks", kind, 'must be "learned" or "zero"')
    return {"sinks": kind, **llama.read(fields)}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_sinks": config.sinks, **llama.write(config)}


LLAMA_SINKS = Family(
    model_type="llama_sinks",
    architectures=("LlamaSinksForCausalLM",),
    defaults=llama.LLAMA.defaults,
    read=read,
    write=write,
    example={"attention_sinks": "learned"},
    layer_names={**LAYER_NAMES, "sink_logits": "self_attn.sinks"},
)
