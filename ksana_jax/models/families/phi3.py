"""Phi-3 and Phi-4: one tensor holds q, k and v, another gate and up; long contexts by LongRoPE, in the mini models for
a part of each head (arXiv:2404.14219, 2412.08905)."""

from __future__ import annotations

from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.families import glm4, mistral
from ksana_jax.models.families.family import LAYER_NAMES, Family, View
from ksana_jax.models.families.fields import Fields
from ksana_jax.models.families.rope import read_rope

QKV = View("self_attn.qkv_proj.weight", ("w_q", "w_k", "w_v"))
NAMES = LAYER_NAMES | dict.fromkeys(QKV.fields, QKV) | dict.fromkeys(glm4.GATE_UP.fields, glm4.GATE_UP)


def read_longrope(fields: Fields, max_position: int) -> RopeConfig:
    """Reads a rope without scaling or with LongRoPE; transformers takes "yarn" for the latter."""
    rope = read_rope(fields, max_position)
    if rope.kind not in ("default", "longrope"):
        fields.problem("rope_scaling type", rope.kind, "supported by phi3: default, longrope")
    return rope


PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    defaults={
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    read=mistral.read,
    write=mistral.write,
    layer_names=NAMES,
    read_rope=read_longrope,
    write_rope=glm4.write_rope,
)
