"""Latents in 8 bits next to their rotated numbers, see `contract.Pool.rotated`: the order of a vector's numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotated_first(x: jax.Array, num_rotated: int) -> jax.Array:
    """Returns vectors [..., H], given in halves, with all rotated numbers before the others."""
    halves, half = x.reshape(*x.shape[:-1], 2, -1), num_rotated // 2
    parts = halves[..., :half], halves[..., half:]
    return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in parts], axis=-1)


def in_halves(x: jax.Array, num_rotated: int) -> jax.Array:
    """Inverts `rotated_first`."""
    parts = x[..., :num_rotated], x[..., num_rotated:]
    halves = [part.reshape(*x.shape[:-1], 2, -1) for part in parts]
    return jnp.concatenate(halves, axis=-1).reshape(x.shape)


def dequantise(codes: jax.Array, scales: jax.Array, rotated: jax.Array) -> jax.Array:
    """Returns float32 vectors [..., H] from codes, scales of their groups, and rotated numbers."""
    numbers = codes.astype(jnp.float32).reshape(*scales.shape, -1) * scales[..., None]
    parts = rotated.astype(jnp.float32), numbers.reshape(codes.shape)
    return in_halves(jnp.concatenate(parts, axis=-1), rotated.shape[-1])
