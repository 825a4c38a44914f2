"""The operators of a layer whose heads and hidden units are divided among devices: two sums over them cross between
them, and with "w8a8" the largest magnitudes of the rows that are multiplied."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.models.int8_matrix import Int8Matrix
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import LayerParams, weights_of
from ksana_jax.sharding.shares import division
from ksana_jax.sharding.specs import AXIS


class DividedOperators(Operators):
    """The contract of `Operators` inside a program of several devices (Megatron-LM, arXiv:1909.08053, section 3).

    Hidden states are whole on each; partial sums cross in the type of hidden states.
    """

    def embed(self, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
        at = tokens - jax.lax.axis_index(AXIS) * embedding.shape[0]
        here = (at >= 0) & (at < embedding.shape[0])
        rows = embedding[jnp.where(here, at, 0)]
        return self.summed(jnp.where(here[..., None], rows, 0))

    def summed(self, out: jax.Array) -> jax.Array:
        return jax.lax.psum(out, AXIS)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, p: LayerParams, spec: LayerSpec, following: LayerParams | None = None
    ) -> jax.Array:
        changes = {"columns": _divided, "once": _once}
        found = {name: changes.get(division(name), lambda w: w)(w) for name, w in weights_of(p).items()}
        p = p.replace(**found)  # pyright: ignore[reportAttributeAccessIssue]
        return super().after_attention(x, attended, p, spec, following)


def _divided(w: Any) -> Any:
    """A matrix whose argument is divided: codes of a whole row of it have one scale."""
    return dataclasses.replace(w, axis=AXIS) if isinstance(w, Int8Matrix) else w


def _once(bias: jax.Array) -> jax.Array:
    """A bias that the first device adds, and zeros on the others."""
    return jnp.where(jax.lax.axis_index(AXIS) == 0, bias, 0)
