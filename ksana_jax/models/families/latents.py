"""Config fields of latents and of DeepSeek's experts that families share, and names of their weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec, LatentSpec, RopeConfig, rotated_part
from ksana_jax.models.families import rope, routing
from ksana_jax.models.families.family import LAYER_NAMES, View, refuse_windows
from ksana_jax.models.families.fields import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, Fields

KV_B = View("self_attn.kv_b_proj.weight", ("w_uk", "w_uv"), "num_heads")
ATTENTION = {
    "attn_norm": LAYER_NAMES["attn_norm"],
    "w_q_plain": "self_attn.q_proj.weight",
    "w_q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "w_q_b": "self_attn.q_b_proj.weight",
    "w_kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "w_uk": KV_B,
    "w_uv": KV_B,
    "w_o": LAYER_NAMES["w_o"],
    "mlp_norm": LAYER_NAMES["mlp_norm"],
}
DENSE = ATTENTION | routing.PLAIN_NAMES
EXPERTS = ATTENTION | {field: name for field, name in routing.NAMES.items() if name.startswith("mlp.")}
EXPERTS |= {
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "w_gate": "mlp.shared_experts.gate_proj.weight",
    "w_up": "mlp.shared_experts.up_proj.weight",
    "w_down": "mlp.shared_experts.down_proj.weight",
}
# The rotated part of a head is what transformers calls its head_dim.
FIELDS = {"head_dim": "qk_rope_head_dim"}
MSCALE = "mscale_all_dim"
# DeepSeek's sizes.
DEFAULTS = {
    "num_key_value_heads": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def read_latents(
    fields: Fields, *, interleaved: bool = True, kinds: tuple[str, ...] = ("full_attention",)
) -> dict[str, Any]:
    """Returns the latents of each layer, and what follows from them; kinds: see `refuse_windows`."""
    refuse_windows(fields, kinds)
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, (False,), "supported: false")
    fields.must_be("rope_interleave", (interleaved,), f"supported: {str(interleaved).lower()}")
    num_heads = fields.integer("num_attention_heads", most=MAX_HEADS)
    fields.must_be("num_key_value_heads", (num_heads,), f"supported: num_attention_heads {num_heads}")
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        if (value := fields.integer(name)) % 2 and not fields.problems:
            fields.problem(name, value, "must be even")
    latent = LatentSpec(
        fields.integer("kv_lora_rank"),
        fields.integer("qk_rope_head_dim"),
        fields.integer("qk_nope_head_dim"),
        fields.integer("v_head_dim"),
        None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        interleaved,
    )
    scale = (latent.plain + latent.rotated) ** -0.5 * _mscale(fields) ** 2
    return {"latent": latent, "head_dim": latent.head_dim, "num_kv_heads": 1, "attention_scale": scale}


def _mscale(fields: Fields) -> float:
    """Returns the root of the factor of attention's scores that a config with YaRN may have."""
    forms = (fields.get(name) for name in ("rope_scaling", "rope_parameters"))
    form = next((form for form in forms if isinstance(form, Mapping) and form), {})
    kind, weight = form.get("rope_type", form.get("type", "default")), form.get(MSCALE)
    if kind == "default" or not weight or fields.problems:
        return 1.0
    if kind != "yarn":
        fields.problem(MSCALE, weight, f"supported: with yarn, the rope is {kind}")
        return 1.0
    return 0.1 * weight * math.log(max(form.get("factor") or 1.0, 1.0)) + 1.0


def write_latents(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a model's latents; a model without them does not read back."""
    latent = config.latent or LatentSpec(2, 2, 1, 1)
    return {
        "num_key_value_heads": config.num_heads,
        "head_dim": latent.rotated,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain,
        "v_head_dim": latent.value,
        "q_lora_rank": latent.query_rank,
    }


def read_rope(fields: Fields, max_position: int) -> RopeConfig:
    """Reads the rope of the rotated numbers, as one of a part of a token's numbers in the pool."""
    return of_tokens(fields, rope.read_rope(fields, max_position))


def of_tokens(fields: Fields, form: RopeConfig) -> RopeConfig:
    part = rotated_part(fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim"))
    return dataclasses.replace(form, partial_rotary_factor=part)


def read_experts(fields: Fields, plain_layers: tuple[int, ...] | None = None, **routes: Any) -> dict[str, Any]:
    """Returns the experts and their width.

    Args:
      plain_layers: layers without experts; None takes the first `first_k_dense_replace`.
      routes: how experts are chosen, fields of `ExpertsSpec`.
    """
    fields.must_be("moe_layer_freq", (1,), "supported: 1")
    num_layers, width = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.integer("moe_intermediate_size")
    if plain_layers is None:
        plain_layers = tuple(range(min(_count(fields, "first_k_dense_replace"), num_layers)))
    number, chosen = (
        fields.integer("n_routed_experts", most=MAX_EXPERTS // num_layers),
        fields.integer("num_experts_per_tok"),
    )
    groups = routes.get("num_groups", 1)
    if number % groups:
        fields.problem("n_routed_experts", number, f"must be a multiple of n_group {groups}")
    elif chosen > (most := number // groups * routes.get("groups_chosen", 1)):
        fields.problem("num_experts_per_tok", chosen, f"must be at most {most}, the experts of the groups chosen")
    experts = ExpertsSpec(
        number,
        chosen,
        shared_d_ff=width * _count(fields, "n_shared_experts"),
        shared_gate=False,
        plain_layers=plain_layers,
        plain_d_ff=fields.integer("intermediate_size") if plain_layers else 0,
        factor=fields.number("routed_scaling_factor", fields.get("routed_scaling_factor")),
        **routes,
    )
    return {"experts": experts, "d_ff": width}


def read_groups(fields: Fields, groups_by: int) -> dict[str, int]:
    """Returns the groups of experts, of which some are chosen from."""
    number, chosen = fields.integer("n_group"), fields.integer("topk_group")
    return {"num_groups": number, "groups_chosen": chosen, "groups_by": groups_by} if number > 1 else {}


def _count(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if value is None:
        return 0
    if problem := checks.integer(name, value, 0):
        fields.problems.append(problem)
        return 0
    return value


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a model's experts; a model without them does not read back."""
    experts = config.experts or ExpertsSpec(1, 1)
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "n_shared_experts": experts.shared_d_ff // config.d_ff,
        "moe_intermediate_size": config.d_ff,
        "first_k_dense_replace": len(experts.plain_layers),
        "intermediate_size": experts.plain_d_ff or config.d_ff,
        "routed_scaling_factor": experts.factor,
        "norm_topk_prob": experts.normalised,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_chosen,
    }
