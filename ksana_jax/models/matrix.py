"""The interface of weights that are stored in another form than an array, such as codes with scales.

A form is a frozen pytree and a subclass of `Matrix`. Products, shares of devices and stacks of matrices ask the form,
so a new one needs no change in them; kernels name the forms that they read, and leave others to `multiply`.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp


class Matrix(abc.ABC):
    """A matrix [out, in] whose arrays have its rows first, [out, ...], and its columns second if they have two axes.

    stacks: True if arrays of several matrices, stacked, are the matrix of all their rows; not if rows are interleaved.
    """

    stacks: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""

    @abc.abstractmethod
    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        """Multiplies x [..., in]; the contract of `layers.linear`."""

    def of_columns(self, axis: str) -> Matrix:
        """Returns the matrix of columns that each of several devices has, inside their program; axis: of the mesh."""
        return self


def dot(x: jax.Array, w: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Multiplies x [..., in] by w [out, in]: [..., out], summed in dtype."""
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


def finished(y: jax.Array, b: jax.Array | None, dtype) -> jax.Array:
    """Adds a bias [out], if given, to sums [..., out], and rounds them to dtype."""
    return (y if b is None else y + b).astype(dtype)
