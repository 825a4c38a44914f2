"""The operators of a layer whose heads and hidden units are divided among devices: two sums over them cross between
them, with "w8a8" the largest magnitudes of the rows that are multiplied, and mean squares of norms over all heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import LayerSpec, NormSpec
from ksana_jax.models.block_matrix import Blocks
from ksana_jax.models.layers import norm_kind, rms_norm, rms_norm_plus_one
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import LayerParams, weights_of
from ksana_jax.sharding.shares import division
from ksana_jax.sharding.specs import AXIS


class DividedOperators(Operators):
    """The contract of `Operators` inside a program of several devices (Megatron-LM, arXiv:1909.08053, section 3).

    Hidden states are whole on each; partial sums cross in the type of hidden states.
    """

    def embed(self, embedding: jax.Array | Blocks, tokens: jax.Array) -> jax.Array:
        at = tokens - jax.lax.axis_index(AXIS) * embedding.shape[0]
        here = (at >= 0) & (at < embedding.shape[0])
        rows = super().embed(embedding, jnp.where(here, at, 0))
        return self.summed(jnp.where(here[..., None], rows, 0))

    def summed(self, out: jax.Array) -> jax.Array:
        return jax.lax.psum(out, AXIS)

    def of_heads(self, values: tuple[float, ...] | jax.Array) -> jax.Array:
        whole = super().of_heads(values)
        return whole.reshape(jax.lax.axis_size(AXIS), -1, *whole.shape[1:])[jax.lax.axis_index(AXIS)]

    @jax.named_scope("norm")
    def normed_projection(self, x: jax.Array, weight: jax.Array, norms: NormSpec) -> jax.Array:
        # A mean of means: devices have equally many channels, and each kv head is on as many of them as any other.
        plus_one = norm_kind(norms.kind).plus_one
        assert plus_one is not None, "check_divisible has asked"
        return (rms_norm_plus_one if plus_one else rms_norm)(x, weight, norms.eps, AXIS)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, p: LayerParams, spec: LayerSpec, following: LayerParams | None = None
    ) -> jax.Array:
        changes = {"columns": _divided, "once": _once}
        found = {name: changes.get(division(name), lambda w: w)(w) for name, w in weights_of(p).items()}
        p = p.replace(**found)  # pyright: ignore[reportAttributeAccessIssue]
        return super().after_attention(x, attended, p, spec, following)


def _divided(w: Any) -> Any:
    """A matrix whose argument is divided."""
    return w.of_columns(AXIS) if isinstance(w, Matrix) else w


def _once(bias: jax.Array) -> jax.Array:
    """The bias on the first device, and zeros on the others."""
    return jnp.where(jax.lax.axis_index(AXIS) == 0, bias, 0)
