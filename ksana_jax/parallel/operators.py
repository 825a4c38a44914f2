"""The operators of a layer whose heads and hidden units are divided among devices: two sums over them cross between
them, and with "w8a8" the largest magnitudes of the rows that are multiplied."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.layer_spec import LayerSpec
from ksana_jax.models.int8_matrix import Int8Matrix
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import LayerParams
from ksana_jax.parallel.specs import AXIS


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
        # One device adds the biases of products that are summed.
        p = p.replace(  # pyright: ignore[reportAttributeAccessIssue]
            w_o=_divided(p.w_o), w_down=_divided(p.w_down), b_o=_once(p.b_o), b_down=_once(p.b_down)
        )
        return super().after_attention(x, attended, p, spec, following)


def _divided(w: Any) -> Any:
    return dataclasses.replace(w, axis=AXIS) if isinstance(w, Int8Matrix) else w


def _once(bias: jax.Array | None) -> jax.Array | None:
    return None if bias is None else jnp.where(jax.lax.axis_index(AXIS) == 0, bias, 0)
