"""Keys and values in 8 or 4 bits inside a Hopper kernel.

Codes are widened through the registers into a tile in shared memory that wgmma reads, or stay in the registers as its
first operand. That is exact: bfloat16 holds every int8, at four instructions for two of them, float16 every e4m3, at
one.

    8 bits    a float32 scale for each token and kv head comes with each unit. A key's scale multiplies its column of
              the scores, a value's its column of the weights before rounding them to 16 bits
    4 bits    scales and zeros of `int4` come with each 64 tokens, and turn codes into numbers while they are widened,
              two at a time
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4 import GROUP
from pallas_kernels.work import TILE_KV


def widened(codes, dtype, plain: bool) -> jax.Array:
    """Codes [64, W] in 16 bits, exactly. plain: leave out what the interpreter of jax 0.10 lacks."""
    if not plain:  # 8 neighbours a thread: read in 8 or 4 bytes, written in 16
        codes = plgpu.layout_cast(codes, plgpu.Layout.WGMMA_UPCAST_4X)
    return codes.astype(dtype)


def operand(codes, dtype) -> jax.Array:
    """Codes of 8 bits [64, W] in 16 bits, exactly, as the first operand of a wgmma in registers.

    Four neighbours come to a thread in one load; threads exchange two of them before they are widened.
    """
    codes = plgpu.layout_cast(codes, plgpu.Layout.WGMMA_UPCAST_2X)
    return plgpu.layout_cast(codes, plgpu.Layout.WGMMA).astype(dtype)


def write(to, x, scales_ref, which: int, first) -> None:
    """Writes keys (which 0) or values (1) [64, W], from widened codes x, to the place that wgmma reads.

    Args:
      scales_ref: of a piece. Scales of int4 codes are [2, H], scales and zeros; x's begin at number `first`.
    """
    if _by_token(scales_ref.shape):
        to[...] = x
        return
    for i in range(0, x.shape[1], GROUP):
        part = x[:, i : i + GROUP]
        # Keys have one for each column, values for each row.
        scale, zero = (
            lax.broadcast_in_dim(scales_ref[j, pl.ds(first + i, GROUP)], part.shape, [1 - which]) for j in range(2)
        )
        to[:, pl.ds(i, GROUP)] = part * scale + zero


def scales_shape(units) -> tuple[int, ...]:
    """Shape of the scales of one unit, of units [..., tokens, H] of codes."""
    _, size, h = units.shape
    return (2, h) if units.dtype == jnp.int4 else (size,)


def _by_token(shape) -> bool:
    return len(shape) == 1


def held(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in shared memory of the scales of a piece; shape: of a unit's scales."""
    return (TILE_KV // shape[0] * _apart(shape[0]),) if _by_token(shape) else shape


def place(ref, i: int, size: int):
    """Place in the scales of a piece for the scales of its unit i, of `size` tokens."""
    return ref.at[pl.ds(i * _apart(size), size)] if _by_token(ref.shape) else ref


def _apart(size: int) -> int:
    """Distance in shared memory between scales of units of `size` tokens: TMA writes to multiples of 128 bytes."""
    return max(size, 32)


def scales(ref, size: int) -> jax.Array:
    """Scales [64] of a piece of units of `size` tokens, from where `place` has them."""
    gap = _apart(size) - size
    found = ref[pl.ds(0, TILE_KV)]
    for i in range(1, TILE_KV // size if gap else 1):
        # Unit i begins i * gap further than in an array without gaps.
        slot = lax.broadcasted_iota(jnp.int32, found.shape, 0)
        found = jnp.where(slot >= i * size, ref[pl.ds(i * gap, TILE_KV)], found)
    return found


def weighted(p, value_scales, dtype):
    """Weights p [64, 64] times their columns' scales [64], and the factors that the sums [64, ...] still need by
    row, or None.

    float16 has a short range: there the largest scale becomes 1.
    """
    by_column = lax.broadcast_in_dim(value_scales, p.shape, [1])
    if dtype != jnp.float16:
        return p * by_column, None
    largest = jnp.maximum(by_column.max(axis=1), 1e-30)
    return p * (by_column * lax.broadcast_in_dim(1 / largest, p.shape, [0])), largest


def weighted_rows(p, value_scales, dtype, plain: bool):
    """`weighted` for weights [64 keys, columns], by their rows' scales. The factor that the sums still need is
    one number for all.

    Args:
      value_scales: gives the scales [64], as often as it is called, in the required layout.
      plain: leave out what the interpreter of jax 0.10 lacks.
    """
    by_row = lax.broadcast_in_dim(value_scales(), p.shape, [0])
    if dtype != jnp.float16:
        return p * by_row, None
    scales = value_scales()
    if not plain:  # each warp holds all of them: the largest one without a meeting of warps
        scales = plgpu.layout_cast(scales, plgpu.Layout.WGMMA.reduce(0))
    largest = jnp.maximum(scales.max(), 1e-30)
    return p * (by_row * (1 / largest)), largest
