"""Kinds of MLPs by name. A new kind is an entry in MLPS."""

from __future__ import annotations

import functools
from typing import Literal

import jax

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.models.experts import clamped, experts
from ksana_jax.models.mlp_forms import MLP, gated, gated_shapes, ungated

__all__ = ["MLP", "MLPS", "gated_shapes", "mlp_kind", "unstated"]

gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
MLPS = {
    "swiglu": gated(jax.nn.silu, "silu"),
    "geglu": gated(gelu_tanh, "gelu_tanh"),
    "gelu": ungated(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": ungated(gelu_tanh),
    "relu": ungated(jax.nn.relu),
    "swiglu_experts": experts(jax.nn.silu),
    "clamped_swiglu_experts": experts(jax.nn.silu, clamped),
}


def mlp_kind(name: str) -> MLP:
    """Returns the kind of MLP with this name.

    Raises:
      ConfigError: the name is unknown.
    """
    checks.require(checks.one_of("mlp", name, MLPS), error=ConfigError)
    return MLPS[name]


def unstated(config: ModelConfig, statement: Literal["divides", "quantises", "row_by_row"]) -> str | None:
    """Returns the kinds of MLPs of a model that do not state what a setting needs, or None."""
    kinds = dict.fromkeys(layer.mlp.kind for layer in config.layers)
    if lacking := [kind for kind in kinds if not getattr(mlp_kind(kind), statement)]:
        return f"mlp {', '.join(map(repr, lacking))} does not state {statement} (MLP in ksana_jax/models/mlp.py)"
    return None
