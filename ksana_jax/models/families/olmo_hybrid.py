"""OLMo Hybrid: OLMo 3 with gated delta rules, and norms before them, in three of four layers; no window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, RopeConfig
from ksana_jax.models.families import olmo2
from ksana_jax.models.families.delta_rule import KINDS, read_layers, write_layers
from ksana_jax.models.families.family import Family
from ksana_jax.models.families.fields import MAX_LAYERS, Fields
from ksana_jax.models.families.rope import read_rope, write_rope

DELTA_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "w_q": "linear_attn.q_proj.weight",
    "w_k": "linear_attn.k_proj.weight",
    "w_v": "linear_attn.v_proj.weight",
    "w_decay": "linear_attn.a_proj.weight",
    "w_beta": "linear_attn.b_proj.weight",
    "w_out_gate": "linear_attn.g_proj.weight",
    "w_conv_q": "linear_attn.q_conv1d.weight",
    "w_conv_k": "linear_attn.k_conv1d.weight",
    "w_conv_v": "linear_attn.v_conv1d.weight",
    "log_decay": "linear_attn.A_log",
    "b_decay": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.o_norm.weight",
    "w_o": "linear_attn.o_proj.weight",
}


def read(fields: Fields) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = [KINDS[layer % 4 == 3] for layer in range(num_layers)]
    kinds[-1] = kinds[-1] if KINDS[1] in kinds else KINDS[1]
    factor = 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0
    layers = read_layers(fields, kinds, beta_factor=factor, norm_placement="before")
    return olmo2.read_norms(fields) | {"recurrent": layers}


def read_ropes(fields: Fields, max_position: int) -> RopeConfig:
    """Returns the rope; none where `rope_parameters` has null as `rope_theta`."""
    form = fields.get("rope_parameters")
    no_rope = isinstance(form, Mapping) and form.get("rope_theta", 0) is None
    return NO_ROPE if no_rope else read_rope(fields, max_position)


def write(config: ModelConfig) -> dict[str, Any]:
    factor = getattr(config.recurrent, "beta_factor", 1.0)
    return olmo2.write(config) | write_layers(config) | {"linear_allow_neg_eigval": factor == 2}


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    if config.layers[0].attention.rope == NO_ROPE:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    written = write_rope(config)
    form = {"rope_type": "default"} | (written.get("rope_scaling") or {})
    return {"rope_parameters": form | {"rope_theta": written["rope_theta"]}}


def _key_dim(fields: Fields) -> int:
    return int(0.75 * fields.integer("hidden_size") / fields.integer("linear_num_key_heads"))


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architectures=("OlmoHybridForCausalLM",),
    defaults={
        "eos_token_id": 100257,
        "linear_num_key_heads": lambda fields: fields.get("num_attention_heads"),
        "linear_num_value_heads": lambda fields: fields.get("num_attention_heads"),
        "linear_key_head_dim": _key_dim,
        "linear_value_head_dim": lambda fields: 2 * fields.integer("linear_key_head_dim"),
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    read=read,
    write=write,
    layer_names=olmo2.NAMES,
    recurrent_names=DELTA_NAMES,
    renamed={
        r"(model\.layers\.\d+\.)attention_layer_norm": r"\1input_layernorm",
        r"(model\.layers\.\d+\.)feedforward_layer_norm": r"\1post_attention_layernorm",
    },
    read_rope=read_ropes,
    write_rope=write_ropes,
)
