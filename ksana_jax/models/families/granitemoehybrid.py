"""Granite 4 with Mamba-2 in most layers, dense or with experts next to an MLP for all tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, RopeConfig
from ksana_jax.core.recurrent import Mamba2Spec
from ksana_jax.models.families import granite, granitemoe, mixtral, routing
from ksana_jax.models.families.family import Family, Name, View
from ksana_jax.models.families.fields import MAX_HEADS, MAX_LAYERS, Fields
from ksana_jax.models.families.rope import read_rope, write_rope

# Names of layers, newer and older.
MAMBA, ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")
SHARED, POSITIONS = "shared_intermediate_size", "position_embedding_type"
GATE_UP = View("shared_mlp.input_linear.weight", ("w_gate", "w_up"))
NAMES: dict[str, Name] = {
    **granitemoe.NAMES,
    **dict.fromkeys(GATE_UP.fields, GATE_UP),
    "w_down": "shared_mlp.output_linear.weight",
}
IN = View("mamba.in_proj.weight", ("w_out_gate", "w_v", "w_k", "w_q", "w_decay"))
CONV = View("mamba.conv1d.weight", ("w_conv_v", "w_conv_k", "w_conv_q"))
CONV_BIAS = View("mamba.conv1d.bias", ("b_conv_v", "b_conv_k", "b_conv_q"))
MAMBA_NAMES: dict[str, Name] = {
    **dict.fromkeys(IN.fields, IN),
    **dict.fromkeys(CONV.fields, CONV),
    **dict.fromkeys(CONV_BIAS.fields, CONV_BIAS),
    "log_decay": "mamba.A_log",
    "b_decay": "mamba.dt_bias",
    "skip": "mamba.D",
    "mamba_norm": "mamba.norm.weight",
    "w_o": "mamba.out_proj.weight",
}


def read(fields: Fields) -> dict[str, Any]:
    fields.must_be("sliding_window", (), "supported: none")
    fields.must_be("mlp_bias", (False,), "supported: false")
    width, bias = fields.integer(SHARED), fields.flag("attention_bias")
    found = granite.read_factors(fields) | {"qkv_bias": bias, "out_bias": bias}
    if fields.get(mixtral.NUMBER) in (0, None):
        found |= {"mlp": "swiglu", "d_ff": width}
    else:
        experts = routing.read_experts(fields, mixtral.NUMBER, shared_d_ff=width)
        found |= {"experts": dataclasses.replace(experts, shared_gate=False)}
    return found | {"recurrent": read_layers(fields)}


def read_layers(fields: Fields) -> Mamba2Spec | None:
    """Returns the layers with Mamba-2, or None if the config's are invalid or there are none."""
    fields.must_be("mamba_proj_bias", (False,), "supported: false")
    fields.must_be("time_step_limit", ([0.0, float("inf")], (0.0, float("inf"))), "supported: none")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    # Some versions of transformers write the second name.
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or [MAMBA[0]] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in MAMBA + ATTENTION for k in kinds):
        fields.problem("layer_types", kinds, f"must list mamba or attention for each of {num_layers} layers")
        return None
    groups, heads = (fields.integer(f"mamba_n_{name}", most=MAX_HEADS) for name in ("groups", "heads"))
    width = fields.integer("mamba_expand", most=64) * fields.integer("hidden_size")
    if heads % groups:
        fields.problem("mamba_n_heads", heads, f"must be a multiple of mamba_n_groups {groups}")
        return None
    if width % heads or fields.get("mamba_d_head") not in ("auto", None, width // heads):
        fields.problem("mamba_d_head", fields.get("mamba_d_head"), f"mamba_n_heads {heads} of it must be {width}")
        return None
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind in MAMBA)
    sizes = groups, heads, fields.integer("mamba_d_state"), width // heads, fields.integer("mamba_d_conv", most=64)
    eps = fields.number("rms_norm_eps", fields.get("rms_norm_eps"))
    return Mamba2Spec(layers, *sizes, fields.flag("mamba_conv_bias"), eps) if layers else None


def read_ropes(fields: Fields, max_position: int) -> RopeConfig:
    fields.must_be(POSITIONS, ("rope", "nope"), "supported: rope, nope")
    return read_rope(fields, max_position) if fields.get(POSITIONS) == "rope" else NO_ROPE


def write(config: ModelConfig) -> dict[str, Any]:
    spec, experts = config.recurrent, config.experts
    found = granite.write(config) | {mixtral.NUMBER: 0, SHARED: config.d_ff}
    if experts is not None:
        found |= routing.write_experts(config, mixtral.NUMBER) | {SHARED: experts.shared_d_ff}
    if not isinstance(spec, Mamba2Spec):
        return found | {"layer_types": [ATTENTION[0]] * config.num_layers}
    return found | {
        "layer_types": [(ATTENTION, MAMBA)[layer in spec.layers][0] for layer in range(config.num_layers)],
        "mamba_n_groups": spec.num_key_heads,
        "mamba_n_heads": spec.num_value_heads,
        "mamba_d_state": spec.key_dim,
        "mamba_d_head": spec.value_dim,
        "mamba_expand": spec.num_value_heads * spec.value_dim // config.d_model,
        "mamba_d_conv": spec.kernel,
        "mamba_conv_bias": spec.bias,
    }


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    rope = config.layers[0].attention.rope
    return {POSITIONS: "nope"} if rope == NO_ROPE else write_rope(config) | {POSITIONS: "rope"}


GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    defaults={
        **granitemoe.GRANITEMOE.defaults,
        SHARED: 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    read=read,
    write=write,
    layer_names=NAMES,
    recurrent_names=MAMBA_NAMES,
    mlps=routing.MLPS,
    read_rope=read_ropes,
    write_rope=write_ropes,
    example={"layer_types": ["mamba"] * 7 + ["attention"], "mamba_n_heads": 8},
)
