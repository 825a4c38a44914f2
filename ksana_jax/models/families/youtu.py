"""Youtu-LLM: a dense model with DeepSeek V3's latents (Tencent, 2026)."""

from __future__ import annotations

from ksana_jax.models.families import latents
from ksana_jax.models.families.family import Family

YOUTU = Family(
    model_type="youtu",
    architectures=("YoutuForCausalLM",),
    defaults={
        **latents.DEFAULTS,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    read=latents.read_latents,
    write=latents.write_latents,
    layer_names=latents.DENSE,
    fields=latents.FIELDS,
    read_rope=latents.read_rope,
)
