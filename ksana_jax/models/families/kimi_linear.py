"""Kimi Linear: delta rules with a decay per channel, latents without positions in each fourth layer, and experts
(arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE
from ksana_jax.core.recurrent import DeltaRuleSpec
from ksana_jax.models.families import delta_rule, latents, routing
from ksana_jax.models.families.deepseek import read_sigmoid_experts
from ksana_jax.models.families.family import Family, Name
from ksana_jax.models.families.fields import MAX_LAYERS, Fields

# Sizes of delta rules in the config of published models, in a mapping, by the names that transformers gives them.
SIZES = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
SIZES |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
FORM, MLPS = "linear_attn_config", ("dense", "sparse")
FIELDS = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), "linear_num_heads"),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), "linear_head_dim"),
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
NAMES: dict[str, Name] = {
    field: name.replace("mlp.", "block_sparse_moe.") if isinstance(name, str) else name
    for field, name in latents.EXPERTS.items()
}
NAMES |= {
    f"w_{part}_experts": f"block_sparse_moe.experts.{{}}.w{i}.weight" for part, i in zip(("gate", "down", "up"), "123")
}
DELTA_NAMES: dict[str, Name] = {
    **{f"w_{x}": f"self_attn.{x}_proj.weight" for x in "qkv"},
    **{f"w_conv_{x}": f"self_attn.{x}_conv1d.weight" for x in "qkv"},
    "w_decay_a": "self_attn.f_a_proj.weight",
    "w_decay": "self_attn.f_b_proj.weight",
    "log_decay": "self_attn.A_log",
    "b_decay": "self_attn.dt_bias",
    "w_beta": "self_attn.b_proj.weight",
    "w_out_gate_a": "self_attn.g_a_proj.weight",
    "w_out_gate": "self_attn.g_b_proj.weight",
    "delta_norm": "self_attn.o_norm.weight",
    "w_o": "self_attn.o_proj.weight",
}


def read(fields: Fields) -> dict[str, Any]:
    needed = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True}
    for name, value in needed.items():
        fields.must_be(name, (value,), f"supported: {value}")
    fields.must_be("rope_scaling", (), "supported: none, layers have no positions")
    num_layers, first = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.get("first_k_dense_replace")
    kinds = [MLPS[not isinstance(first, int) or layer >= first] for layer in range(num_layers)]
    fields.must_be("mlp_layer_types", (kinds,), f"supported: dense in the first first_k_dense_replace {first} layers")
    found = latents.read_latents(fields, kinds=delta_rule.KINDS) | read_sigmoid_experts(fields)
    return found | {"recurrent": read_layers(fields)}


def read_layers(fields: Fields) -> DeltaRuleSpec | None:
    """Returns the layers with delta rules: those that `layer_types` names, or the mapping of published configs, where
    layers count from 1."""
    form, num_layers = fields.get(FORM) or {}, fields.integer("num_hidden_layers", most=MAX_LAYERS)
    form = form if isinstance(form, Mapping) else {"full_attn_layers": form}  # which is refused
    kinds = [delta_rule.KINDS[layer > 0 and layer % 4 == 0] for layer in range(num_layers)]
    if "full_attn_layers" in form:
        full, others = (
            x if isinstance(x := form.get(name), list) else [] for name in ("full_attn_layers", "kda_layers")
        )
        if sorted([*full, *others], key=str) != sorted(range(1, num_layers + 1), key=str):
            fields.problem(
                FORM, fields.get(FORM), f"full_attn_layers and kda_layers must be the layers 1 to {num_layers}"
            )
            return None
        kinds = [delta_rule.KINDS[layer + 1 in full] for layer in range(num_layers)]
    values = {**fields.values, **{name: form[other] for name, other in SIZES.items() if other in form}}
    flat = Fields(values, fields.source, fields.defaults, fields.names)
    eps, rank = fields.number("rms_norm_eps", fields.get("rms_norm_eps")), flat.integer("linear_key_head_dim")
    spec = delta_rule.read_layers(flat, kinds, eps=eps, rank=rank)
    fields.problems += [problem for problem in dict.fromkeys(flat.problems) if problem not in fields.problems]
    return spec


def write(config: ModelConfig) -> dict[str, Any]:
    written = latents.write_latents(config) | latents.write_experts(config) | delta_rule.write_layers(config)
    return written | {"qk_rope_head_dim": written["head_dim"]}


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    defaults={
        **latents.DEFAULTS,
        "head_dim": lambda fields: fields.get("qk_rope_head_dim"),
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 32),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 2**20,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
    },
    read=read,
    write=write,
    layer_names=NAMES,
    plain_names=routing.PLAIN_NAMES,
    recurrent_names=DELTA_NAMES,
    stored_shapes={"log_decay": (1, 1, -1, 1)},
    # transformers 5.24 saves the MLPs of layers without experts by the name of those with them.
    renamed={r"(model\.layers\.\d+\.)block_sparse_moe\.(gate|up|down)_proj": r"\1mlp.\2_proj"},
    fields=FIELDS,
    mlps=routing.MLPS,
    read_rope=lambda fields, max_position: NO_ROPE,
    write_rope=lambda config: {},
    example={"intermediate_size": 96},
)
