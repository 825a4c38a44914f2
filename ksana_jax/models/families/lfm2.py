"""LFM2: gated short convolutions instead of attention in most layers, norms of queries and keys (arXiv:2511.23404)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.recurrent import ShortConvSpec
from ksana_jax.models.families.family import LAYER_NAMES, TOP_NAMES, Family, Name, View
from ksana_jax.models.families.fields import MAX_LAYERS, Fields

NAMES = LAYER_NAMES | {
    "attn_norm": "operator_norm.weight",
    "w_o": "self_attn.out_proj.weight",
    "q_norm": "self_attn.q_layernorm.weight",
    "k_norm": "self_attn.k_layernorm.weight",
    "mlp_norm": "ffn_norm.weight",
    "w_gate": "feed_forward.w1.weight",
    "w_up": "feed_forward.w3.weight",
    "w_down": "feed_forward.w2.weight",
}
IN = View("conv.in_proj.weight", ("w_in_b", "w_in_c", "w_in_x"))
IN_BIAS = View("conv.in_proj.bias", ("b_in_b", "b_in_c", "b_in_x"))
CONV_NAMES: dict[str, Name] = {
    **dict.fromkeys(IN.fields, IN),
    **dict.fromkeys(IN_BIAS.fields, IN_BIAS),
    "w_conv": "conv.conv.weight",
    "b_conv": "conv.conv.bias",
    "w_o": "conv.out_proj.weight",
    "b_o": "conv.out_proj.bias",
}


def read(fields: Fields) -> dict[str, Any]:
    return {"qk_norm": "head", "d_ff": read_width(fields), "recurrent": read_layers(fields)}


def read_width(fields: Fields) -> int:
    """Returns the width of the MLPs, which some configs round up from two thirds of `intermediate_size`."""
    width = fields.integer("block_ff_dim" if fields.values.get("block_ff_dim") is not None else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if (factor := fields.get("block_ffn_dim_multiplier")) is None:
        return width
    multiple = fields.integer("block_multiple_of")
    return -(-int(fields.number("block_ffn_dim_multiplier", factor, high=1e3) * width) // multiple) * multiple


def read_layers(fields: Fields) -> ShortConvSpec | None:
    """Returns the layers with convolutions: `layer_types`, or those that are not in `full_attn_idxs`."""
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = fields.get("layer_types")
    if kinds is None:
        full = fields.get("full_attn_idxs")
        full = range(num_layers) if full is None else full if isinstance(full, list) else ()
        kinds = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    sound = isinstance(kinds, list) and len(kinds) == num_layers
    if not sound or any(kind not in ("conv", "full_attention") for kind in kinds):
        fields.problem("layer_types", kinds, f"must list conv or full_attention for each of {num_layers} layers")
        return None
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")
    spec = ShortConvSpec(layers, fields.integer("conv_L_cache", most=64), fields.flag("conv_bias"))
    return spec if layers else None


def write(config: ModelConfig) -> dict[str, Any]:
    spec = config.recurrent if isinstance(config.recurrent, ShortConvSpec) else ShortConvSpec(())
    return {
        "layer_types": ["conv" if layer in spec.layers else "full_attention" for layer in range(config.num_layers)],
        "conv_L_cache": spec.kernel,
        "conv_bias": spec.bias,
        "block_auto_adjust_ff_dim": False,
    }


LFM2 = Family(
    model_type="lfm2",
    architectures=("Lfm2ForCausalLM",),
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "tie_word_embeddings": lambda fields: fields.values.get("tie_embedding", True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    read=read,
    write=write,
    top_names=TOP_NAMES | {"final_norm": "model.embedding_norm.weight"},
    layer_names=NAMES,
    recurrent_names=CONV_NAMES,
    fields={"rms_norm_eps": "norm_eps"},
    example={"full_attn_idxs": [2, 5]},
)
