"""Matrices in int8: codes, with a scale for each row."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.models.matrix import Matrix, dot, finished

MOST = 127  # codes are -127..127, symmetric


@flax.struct.dataclass
class Int8Matrix(Matrix):
    """A matrix [out, in] whose rows are codes times a scale.

    rounds_inputs: True if inputs are rounded to codes as well, each row separately.
    axis: of devices that each hold columns of the matrix, inside a program; None if one device holds all.
    """

    codes: jax.Array  # int8 [out, in]
    scales: jax.Array  # float32 [out]
    rounds_inputs: bool = flax.struct.field(pytree_node=False, default=False)
    axis: str | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        if self.rounds_inputs:
            codes, scales = rounded_rows(x, self.axis)
            y = dot(codes, self.codes, jnp.int32).astype(jnp.float32) * scales[..., None] * self.scales
        else:
            y = dot(x, self.codes.astype(x.dtype)) * self.scales
        return finished(y, b, dtype or x.dtype)

    def of_columns(self, axis: str) -> Int8Matrix:
        return dataclasses.replace(self, axis=axis)


@functools.partial(jax.jit, static_argnames="rounds_inputs")
def quantise(w: jax.Array, *, rounds_inputs: bool = False) -> Int8Matrix:
    """Rounds a matrix [out, in] to the nearest codes; the largest magnitude of each row has code 127 or -127."""
    return Int8Matrix(*rounded_rows(w), rounds_inputs)


# By the setting `quantization`.
QUANTISERS = {"int8": quantise, "w8a8": functools.partial(quantise, rounds_inputs=True)}


def rounded_rows(x: jax.Array, axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Rounds rows [..., D] to the nearest codes; returns these in int8, and a scale [...] for each row.

    axis: of devices that each hold a part of every row; the scale is the whole row's.
    """
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis=-1)
    if axis is not None:
        largest = jax.lax.pmax(largest, axis)
    codes = jnp.round(x * jnp.where(largest > 0, MOST / largest, 0.0)[..., None])
    return codes.astype(jnp.int8), largest / MOST
