"""Gemma: a gated GELU, norms that add 1 to their weights, and an embedding times the root of its width
(arXiv:2403.08295)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families.family import Family, refuse_windows
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    fields.must_be("use_bidirectional_attention", (False,), "supported: false")
    # Versions of transformers differ in which of the two names the activation.
    fields.must_be("hidden_activation", ("gelu_pytorch_tanh",), "supported: gelu_pytorch_tanh")
    bias = fields.flag("attention_bias")
    scale = fields.integer("hidden_size") ** 0.5
    return {"qkv_bias": bias, "out_bias": bias, "embed_scale": scale, "norm": "rms_plus_one"}


def write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


GEMMA = Family(
    model_type="gemma",
    architectures=("GemmaForCausalLM",),
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    read=read,
    write=write,
    mlps={"gelu_pytorch_tanh": "geglu"},
)
