"""Kinds of MLPs: weight shapes and forward functions. A new kind is an entry in MLPS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.layer_spec import MLPSpec
from ksana_jax.models.layers import Linear

# Names by which kernels know the activation of a gated MLP.
Activation = Literal["silu", "gelu_tanh"]


class MLP(NamedTuple):
    """A kind of MLP, and the facts that settings depend on. A setting refuses a kind that leaves out what it needs.

    shapes: (width D, spec) -> shapes of its weights, by field of `params.LayerParams`.
    apply: (x [..., D], weights with those fields, linear, spec) -> [..., D].
    takes_joined: apply also takes gate and up as one matrix, see `models.joined`.
    divides: for `tensor_parallel_size`. From each device's parts of the weights, apply computes a part of the result,
      and the parts add up to it. Its bias is divided, or states that it is added once (`models.weight`).
    quantises: for `quantization`. apply reads its matrices only through `linear`, which also takes codes and packed
      matrices; matrices of other kinds stay as loaded.
    row_by_row: for `numerics: invariant`. Apart from `linear`, apply consists of functions of single numbers.
    activation: of a gated MLP, by which kernels compute it; None leaves it to `apply`.
    """

    shapes: Callable[[int, MLPSpec], dict[str, tuple[int, ...]]]
    apply: Callable[[jax.Array, Any, Linear, MLPSpec], jax.Array]
    takes_joined: bool = False
    divides: bool = False
    quantises: bool = False
    row_by_row: bool = False
    activation: Activation | None = None


def gated(function: Callable[[jax.Array], jax.Array], activation: Activation | None = None) -> MLP:
    """Returns a gated MLP, down(function(gate x) * up x) (arXiv:2002.05202).

    Args:
      function: of single numbers. activation: its name, if kernels have it.
    """

    def apply(x, p, linear, spec):
        if p.w_gate_up is None:
            gate, up = linear(x, p.w_gate, p.b_gate), linear(x, p.w_up, p.b_up)
        else:
            gate, up = jnp.split(linear(x, p.w_gate_up, p.b_gate_up), 2, axis=-1)
        return linear(function(gate) * up, p.w_down, p.b_down)

    stated = dict.fromkeys(("takes_joined", "divides", "quantises", "row_by_row"), True)
    return MLP(gated_shapes, apply, **stated, activation=activation)


def gated_shapes(d_model: int, spec: MLPSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the three matrices, and of the three biases if the spec has them."""
    d, f = d_model, spec.d_ff
    shapes: dict[str, tuple[int, ...]] = {"w_gate": (f, d), "w_up": (f, d), "w_down": (d, f)}
    if spec.bias:
        shapes |= {"b_gate": (f,), "b_up": (f,), "b_down": (d,)}
    return shapes


MLPS = {
    "swiglu": gated(jax.nn.silu, "silu"),
    "geglu": gated(functools.partial(jax.nn.gelu, approximate=True), "gelu_tanh"),
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
