"""Sums in a stated order, so that a row's sum is the same bit by bit whatever the number of rows.

XLA chooses the order of `jnp.sum` and `jnp.cumsum` by the shape of the whole array. It keeps single additions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sum_by_halves(x: jax.Array) -> jax.Array:
    """Sums x [..., V] over its last dimension: [...]. Adds one half to the other until one number is left."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        x, odd = x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]
        if size % 2:
            x = jnp.concatenate([x, odd], axis=-1)
    return x[..., 0]


def running_sum(x: jax.Array) -> jax.Array:
    """Computes the sums [..., V] of the first 1, 2, ... V numbers of x [..., V] (Hillis and Steele, 1986)."""
    step = 1
    while step < x.shape[-1]:
        x = x + jnp.concatenate([jnp.zeros_like(x[..., :step]), x[..., :-step]], axis=-1)
        step *= 2
    return x
