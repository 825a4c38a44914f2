"""Gated and ungated MLPs as values: weight shapes, forward function, and the facts that settings depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import MLPSpec

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
    routes: apply takes two more arguments: which rows are of tokens (bool [...]), or None if all are, for the others
      may have any result; and `Operators.grouped`, or None.
    """

    shapes: Callable[[int, MLPSpec], dict[str, tuple[int, ...]]]
    apply: Callable[..., jax.Array]
    takes_joined: bool = False
    divides: bool = False
    quantises: bool = False
    row_by_row: bool = False
    activation: Activation | None = None
    routes: bool = False


STATED = dict.fromkeys(("divides", "quantises", "row_by_row"), True)


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

    return MLP(gated_shapes, apply, takes_joined=True, **STATED, activation=activation)


def ungated(function: Callable[[jax.Array], jax.Array]) -> MLP:
    """Returns an MLP without a gate, down(function(up x)). function: of single numbers."""

    def apply(x, p, linear, spec):
        return linear(function(linear(x, p.w_up, p.b_up)), p.w_down, p.b_down)

    return MLP(ungated_shapes, apply, **STATED)


def ungated_shapes(d_model: int, spec: MLPSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of both matrices, and of both biases if the spec has them."""
    d, f = d_model, spec.d_ff
    matrices = {"w_up": (f, d), "w_down": (d, f)}
    return matrices | {"b_up": (f,), "b_down": (d,)} if spec.bias else matrices


def gated_shapes(d_model: int, spec: MLPSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the three matrices, and of the three biases if the spec has them."""
    gate = {"w_gate": (spec.d_ff, d_model), **({"b_gate": (spec.d_ff,)} if spec.bias else {})}
    return gate | ungated_shapes(d_model, spec)
