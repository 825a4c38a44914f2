"""Config fields of experts that families share, and names of their weights."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec
from ksana_jax.models.families.family import LAYER_NAMES
from ksana_jax.models.families.fields import MAX_EXPERTS, MAX_LAYERS, Fields

# Without an MLP.
OTHER_NAMES = {field: name for field, name in LAYER_NAMES.items() if not name.startswith("mlp.")}
NAMES = OTHER_NAMES | {
    "w_router": "mlp.gate.weight",
    "w_gate_experts": "mlp.experts.{}.gate_proj.weight",
    "w_up_experts": "mlp.experts.{}.up_proj.weight",
    "w_down_experts": "mlp.experts.{}.down_proj.weight",
}
# Names in layers without experts among others.
PLAIN_NAMES = {field: name for field, name in LAYER_NAMES.items() if name.startswith("mlp.")}
MLPS = {"silu": "swiglu_experts", "swish": "swiglu_experts"}
# Fields of other ways to choose experts, with the values at which they change nothing. transformers ignores them in
# these families, but the author of the file expects them.
NEUTRAL = {
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "mlp_bias": False,
}


def read_experts(fields: Fields, number: str, *, normalised: bool = True, shared_d_ff: int = 0) -> ExpertsSpec:
    """Returns the experts of each layer; number: the config field of their number."""
    for name, value in NEUTRAL.items():
        fields.must_be(name, (value,), f"supported: {value}")
    most = MAX_EXPERTS // fields.integer("num_hidden_layers", most=MAX_LAYERS)
    num_experts, num_chosen = fields.integer(number, most=most), fields.integer("num_experts_per_tok")
    if num_chosen > num_experts and not fields.problems:
        fields.problem("num_experts_per_tok", num_chosen, f"must be at most {number} {num_experts}")
    return ExpertsSpec(num_experts, num_chosen, normalised, shared_d_ff)


def write_experts(config: ModelConfig, number: str) -> dict[str, Any]:
    """Returns the fields of a model's experts; a model without them does not read back."""
    experts = config.experts or ExpertsSpec(1, 1)
    return {number: experts.num_experts, "num_experts_per_tok": experts.num_chosen}
