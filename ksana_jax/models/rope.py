"""Rotary position embeddings (arXiv:2104.09864) with given frequencies. Knows positions, no cache."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rope(NamedTuple):
    """Frequencies [H/2] in radians per token, and a factor that scales rotated vectors (YaRN; otherwise 1).

    If only a part of a head is rotated, the remaining pairs have frequency 0 and, in an array [H/2], scale 1.
    """

    inv_freq: jax.Array | np.ndarray
    scale: float | np.ndarray

    @jax.named_scope("rope")
    def angles(self, positions) -> tuple[jax.Array, jax.Array]:
        """Returns cosines and sines [..., H/2] for text positions [...], in float32."""
        angle = jnp.asarray(positions, jnp.float32)[..., None] * self.inv_freq
        return jnp.cos(angle), jnp.sin(angle)

    def rotate(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Rotates x [..., heads, H] by angles [..., H/2]; i pairs with i + H/2, as in Hugging Face checkpoints."""
        return _rotate(x, angles, self.scale)

    def rotate_first(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], dims: int) -> jax.Array:
        """Rotates the first dims numbers of x [..., heads, D] by the first angles; i pairs with i + dims/2."""
        scale = self.scale[: dims // 2] if isinstance(self.scale, np.ndarray) else self.scale
        first = _rotate(x[..., :dims], tuple(a[..., : dims // 2] for a in angles), scale)
        return jnp.concatenate([first, x[..., dims:]], axis=-1)

    def rotate_further(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Rotates vectors that are already rotated and scaled, without scaling them again."""
        return _rotate(x, angles, 1.0)


@jax.named_scope("rope")
def _rotate(x, angles, scale):
    cos, sin = (a[..., None, :] * scale for a in angles)
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def grown(q: jax.Array, positions: jax.Array, growth: tuple[float, int] | None) -> jax.Array:
    """Multiplies queries [..., T, N, H] at positions [T] by a factor, see `core.layer_spec.AttentionSpec`."""
    if growth is None:
        return q
    beta, length = growth
    factor = 1 + beta * jnp.log1p((jnp.maximum(positions, 0) // length).astype(jnp.float32))
    return q * factor[:, None, None].astype(q.dtype)
