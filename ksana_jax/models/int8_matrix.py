"""Matrices in int8: codes, with a scale for each row."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

MOST = 127  # codes are -127..127, symmetric


@flax.struct.dataclass
class Int8Matrix:
    """A matrix [out, in] whose rows are codes times a scale."""

    codes: jax.Array  # int8 [out, in]
    scales: jax.Array  # float32 [out]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


@jax.jit
def quantise(w: jax.Array) -> Int8Matrix:
    """Rounds a matrix [out, in] to the nearest codes; the largest magnitude of each row has code 127 or -127."""
    w = w.astype(jnp.float32)
    scales = jnp.abs(w).max(axis=1) / MOST
    codes = jnp.round(w / jnp.where(scales > 0, scales, 1.0)[:, None])
    return Int8Matrix(codes.astype(jnp.int8), scales)
