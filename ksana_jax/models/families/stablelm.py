"""StableLM: a Llama with layer norms and a quarter of each head rotated; in some models attention and MLP read the same
normalised hidden states (arXiv:2402.17834)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.families import glm4
from ksana_jax.models.families.family import LAYER_NAMES, TOP_NAMES, Family, refuse_windows, with_bias
from ksana_jax.models.families.fields import Fields


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    fields.must_be("qk_layernorm", (False,), "supported: false")
    placement = "parallel_shared" if fields.flag("use_parallel_residual") else "before"
    return {"norm": "layer", "norm_placement": placement, "qkv_bias": fields.flag("use_qkv_bias")}


def write(config: ModelConfig) -> dict[str, Any]:
    parallel = config.norm_placement == "parallel_shared"
    return {"use_qkv_bias": config.qkv_bias, "use_parallel_residual": parallel}


STABLELM = Family(
    model_type="stablelm",
    architectures=("StableLmForCausalLM",),
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "use_parallel_residual": False,
        "partial_rotary_factor": 0.25,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    read=read,
    write=write,
    top_names=TOP_NAMES | {"final_norm": with_bias("model.norm")},
    layer_names=LAYER_NAMES
    | {"attn_norm": with_bias("input_layernorm"), "mlp_norm": with_bias("post_attention_layernorm")},
    fields={"rms_norm_eps": "layer_norm_eps", "head_dim": None},
    write_rope=glm4.write_rope,
)
