"""Config fields of layers with gated delta rules that families share, and names of their weights."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.recurrent import DeltaRuleSpec
from ksana_jax.models.families.family import View
from ksana_jax.models.families.fields import MAX_HEADS, MAX_LAYERS, Fields

KINDS = ("linear_attention", "full_attention")
# Without the projections of queries, keys, values, decay, beta and gate.
NAMES = {
    **dict.fromkeys(parts := ("w_conv_q", "w_conv_k", "w_conv_v"), View("linear_attn.conv1d.weight", parts)),
    "log_decay": "linear_attn.A_log",
    "b_decay": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm.weight",
    "w_o": "linear_attn.out_proj.weight",
}


def read_layers(fields: Fields, kinds: list[str], **more: Any) -> DeltaRuleSpec | None:
    """Returns the layers with delta rules: those that `layer_types` names, or `kinds`.

    more: fields of `DeltaRuleSpec` beyond sizes.
    """
    kinds = kinds if fields.get("layer_types") is None else fields.get("layer_types")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in KINDS for kind in kinds):
        fields.problem("layer_types", kinds, f"must list {' or '.join(KINDS)} for each of {num_layers} layers")
        return None
    sizes = [fields.integer(f"linear_num_{kind}_heads", most=MAX_HEADS) for kind in ("key", "value")]
    if sizes[1] % max(sizes[0], 1):
        fields.problem("linear_num_value_heads", sizes[1], f"must be a multiple of linear_num_key_heads {sizes[0]}")
        return None
    sizes += [fields.integer(f"linear_{kind}_head_dim") for kind in ("key", "value")]
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[0])
    return DeltaRuleSpec(layers, *sizes, kernel=fields.integer("linear_conv_kernel_dim", most=64), **more)


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Returns the config fields of a model's delta rules; a model without them does not read back."""
    spec = config.recurrent
    if not isinstance(spec, DeltaRuleSpec):
        return {}
    return {
        "layer_types": [KINDS[layer not in spec.layers] for layer in range(config.num_layers)],
        "linear_num_key_heads": spec.num_key_heads,
        "linear_num_value_heads": spec.num_value_heads,
        "linear_key_head_dim": spec.key_dim,
        "linear_value_head_dim": spec.value_dim,
        "linear_conv_kernel_dim": spec.kernel,
    }
