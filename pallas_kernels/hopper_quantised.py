"""Keys and values in 8 bits inside a Hopper kernel, with a float32 scale for each token and kv head.

Codes are widened by way of the registers into a tile in shared memory that wgmma reads. That is exact: bfloat16 holds
every int8, at four instructions for two of them, float16 every e4m3, at one. The scales come with their units; that of
a key multiplies its column of the scores, that of a value its column of the weights before rounding them to 16 bits.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.work import TILE_KV


def widened(codes, dtype, plain: bool) -> jax.Array:
    """8-bit numbers [64, H] in 16 bits, exactly. plain: leave out what the interpreter of jax 0.10 lacks."""
    if not plain:  # 8 neighbours a thread: read in 8 bytes, written in 16
        codes = plgpu.layout_cast(codes, plgpu.Layout.WGMMA_UPCAST_4X)
    return codes.astype(dtype)


def apart(size: int) -> int:
    """Scales of units of `size` tokens lie so far apart in shared memory: TMA writes to multiples of 128 bytes."""
    return max(size, 32)


def scales(ref, size: int) -> jax.Array:
    """Scales [64] of a piece of units of `size` tokens, from where `apart` has them."""
    gap = apart(size) - size
    found = ref[pl.ds(0, TILE_KV)]
    for i in range(1, TILE_KV // size if gap else 1):
        # Unit i begins i * gap further than in an array without gaps.
        slot = lax.broadcasted_iota(jnp.int32, found.shape, 0)
        found = jnp.where(slot >= i * size, ref[pl.ds(i * gap, TILE_KV)], found)
    return found


def weighted(p, value_scales, dtype):
    """Weights p [64, 64] times their columns' scales [64], and what the sums [64, ...] are yet to be multiplied with by
    row, or None.

    float16 has a short range: there the largest scale becomes 1.
    """
    by_column = lax.broadcast_in_dim(value_scales, p.shape, [1])
    if dtype != jnp.float16:
        return p * by_column, None
    largest = jnp.maximum(by_column.max(axis=1), 1e-30)
    return p * (by_column * lax.broadcast_in_dim(1 / largest, p.shape, [0])), largest
