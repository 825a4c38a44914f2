"""A form of weights that is not the package's: codes with a scale for each block of a row."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.models.matrix import Matrix, dot, finished
from ksana_jax.models.params import Params, stated, weights_of

SIZE = 8


@flax.struct.dataclass
class Blocks(Matrix):
    """A matrix [out, in] in blocks of SIZE codes."""

    codes: jax.Array  # int8 [out, in]
    scales: jax.Array  # float32 [out, in / SIZE]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def multiply(self, x, b=None, *, dtype=None):
        return finished(dot(x, self.numbers().astype(x.dtype)), b, dtype or x.dtype)

    def numbers(self) -> jax.Array:
        return self.codes * jnp.repeat(self.scales, SIZE, axis=1)


def in_blocks(w: jax.Array) -> Blocks:
    blocks = w.reshape(len(w), -1, SIZE)
    scales = jnp.abs(blocks).max(-1) / 127
    return Blocks(jnp.round(blocks / scales[..., None]).astype(jnp.int8).reshape(w.shape), scales)


def blocked(params: Params) -> tuple[Params, Params]:
    """Params with the matrices of layers in blocks, and the same numbers in arrays."""
    found, plain = [], []
    for layer in params.layers:
        made = {n: in_blocks(w) for n, w in weights_of(layer).items() if stated(n, "a test").quantises}
        found.append(layer.replace(**made))
        plain.append(layer.replace(**{n: w.numbers() for n, w in made.items()}))
    return params.replace(layers=tuple(found)), params.replace(layers=tuple(plain))
