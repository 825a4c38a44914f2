"""MiniCPM3: latents whose rotation pairs halves, and factors on its embedding, residuals and logits (OpenBMB, 2024)."""

from __future__ import annotations

import math
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import latents
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import Fields

RANGE = (1e-6, 1e6)


def read(fields: Fields) -> dict[str, Any]:
    found = {name: fields.number(name, fields.get(name), *RANGE) for name in ("scale_emb", "scale_depth")}
    return latents.read_latents(fields, interleaved=False) | {
        "embed_scale": found["scale_emb"],
        "residual_scale": found["scale_depth"] / math.sqrt(fields.integer("num_hidden_layers")),
        "logit_scale": fields.integer("dim_model_base") / fields.integer("hidden_size"),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    return latents.write_latents(config) | {
        "scale_emb": config.embed_scale,
        # 15 digits, since x / sqrt(62) * sqrt(62) may not be x.
        "scale_depth": float(f"{config.residual_scale * math.sqrt(config.num_layers):.15g}"),
        "dim_model_base": round(config.logit_scale * config.d_model),
    }


MINICPM3 = Family(
    model_type="minicpm3",
    architectures=("MiniCPM3ForCausalLM",),
    defaults={
        **latents.DEFAULTS,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": lambda fields: max(fields.integer("hidden_size") // fields.integer("num_attention_heads"), 1),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "scale_emb": 12,
        "scale_depth": lambda fields: (
            1.4 if "scale_depth" not in fields.values else fields.integer("num_hidden_layers") ** 0.5
        ),
        "dim_model_base": lambda fields: (
            256 if "dim_model_base" not in fields.values else fields.integer("hidden_size")
        ),
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    write=write,
    layer_names=latents.DENSE,
    fields=latents.FIELDS,
    read_rope=latents.read_rope,
)
