"""Kinds of MLPs: weight shapes and forward functions. A new kind is an entry in MLPS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax import checks
from ksana_jax.errors import ConfigError
from ksana_jax.layer_spec import MLPSpec
from ksana_jax.models.layers import Linear


class MLP(NamedTuple):
    """A kind of MLP.

    shapes: (width D, spec) -> shapes of its weights, by field of `params.LayerParams`.
    apply: (x [..., D], weights with those fields, linear) -> [..., D].
    takes_joined: apply also takes gate and up as one matrix, see `models.joined`.
    """

    shapes: Callable[[int, MLPSpec], dict[str, tuple[int, ...]]]
    apply: Callable[[jax.Array, Any, Linear], jax.Array]
    takes_joined: bool = False


def gated(activation: Callable[[jax.Array], jax.Array]) -> MLP:
    """Returns a gated MLP, down(activation(gate x) * up x) (arXiv:2002.05202)."""

    def apply(x, p, linear):
        if p.w_gate_up is None:
            gate, up = linear(x, p.w_gate, p.b_gate), linear(x, p.w_up, p.b_up)
        else:
            gate, up = jnp.split(linear(x, p.w_gate_up, p.b_gate_up), 2, axis=-1)
        return linear(activation(gate) * up, p.w_down, p.b_down)

    return MLP(gated_shapes, apply, takes_joined=True)


def gated_shapes(d_model: int, spec: MLPSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the three matrices, and of the three biases if the spec has them."""
    d, f = d_model, spec.d_ff
    shapes: dict[str, tuple[int, ...]] = {"w_gate": (f, d), "w_up": (f, d), "w_down": (d, f)}
    if spec.bias:
        shapes |= {"b_gate": (f,), "b_up": (f,), "b_down": (d,)}
    return shapes


MLPS = {
    "swiglu": gated(jax.nn.silu),
    "geglu": gated(functools.partial(jax.nn.gelu, approximate=True)),
}


def mlp_kind(name: str) -> MLP:
    """Returns the kind of MLP with this name.

    Raises:
      ConfigError: there is none.
    """
    checks.require(checks.one_of("mlp", name, MLPS), error=ConfigError)
    return MLPS[name]
