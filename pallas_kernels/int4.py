"""Keys and values in 4 bits, the KIVI way: keys share a scale along their channels, values along their tokens.

Keys have outliers in a few channels, the same ones for all tokens; values have none. So in each tile of 64 tokens x 64
channels of a block, keys have a scale and a zero for each channel (column), values for each token (row):

    number = code * scale + zero, rounded to bfloat16        code: int4, -8 to 7

With scales and zeros a number takes 4.5 bits. Codes have 3 significant bits; scales are given 5, so that bfloat16 holds
their product exactly: one multiplication and one addition in bfloat16 give the same number on every device.

A block is quantised when it is full. The newest tokens, not yet a block, stay in 16 bits in a separate pool:
attention to each of the two with `return_lse`, merged by their log-sum-exp, is attention to both.

Source: KIVI, arXiv:2402.02750, section 3. Its groups are of 32; kernels read 64 at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

GROUP = 64  # tokens and channels


def scales_shape(pool_shape) -> tuple[int, ...]:
    """Shape [..., 2, K, B / 64, 2, H] of the scales (first) and zeros of a pool [..., 2, K, B, H].

    For keys, number h belongs to channel h. For values, number 64 * c + t belongs to token t in channels from 64 * c.

    Raises:
      ValueError: blocks or heads are not made of whole groups.
    """
    *outer, block_size, head_dim = pool_shape
    if block_size % GROUP or head_dim % GROUP:
        raise ValueError(
            f"blocks of {block_size} tokens with a head dim of {head_dim}; int4 needs multiples of {GROUP} for both"
        )
    return (*outer, block_size // GROUP, 2, head_dim)


def quantise(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Full blocks [..., 2, K, B, H] of keys and values as codes int4 of that shape, and scales bfloat16.

    Returns:
      codes and scales; a number is off by at most half a scale, plus bfloat16's rounding of it and of the zero.
    """
    shape = scales_shape(blocks.shape)
    tiles = _tiled(blocks.astype(jnp.float32))
    low, high = tiles.min(axis=-1), tiles.max(axis=-1)
    # 15 steps from the lowest number to the highest. Steps are rounded up: 16 bits minus 3 leave 5
    # significant ones.
    mantissa, exponent = jnp.frexp((high - low) / 15)
    scale = jnp.ldexp(jnp.ceil(mantissa * 32) / 32, exponent)
    zero = (low + 8 * scale).astype(jnp.bfloat16)
    codes = (tiles - zero[..., None].astype(jnp.float32)) / jnp.where(scale == 0, 1, scale)[..., None]
    codes = jnp.clip(jnp.round(codes), -8, 7).astype(jnp.int8)
    packed = jnp.stack([scale.astype(jnp.bfloat16), zero], axis=-3)  # [..., 2, K, G, 2, C, 64]
    return _untiled(codes).astype(jnp.int4), packed.reshape(shape)


def dequantise(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Numbers [..., 2, K, B, H] float32, each one that bfloat16 holds, of codes and their scales."""
    tiles = _tiled(codes.astype(jnp.float32))
    packed = scales.astype(jnp.float32).reshape(*scales.shape[:-1], -1, GROUP)
    scale, zero = packed[..., 0, :, :, None], packed[..., 1, :, :, None]
    return _untiled((tiles * scale + zero).astype(jnp.bfloat16).astype(jnp.float32))


def _tiled(blocks):
    """[..., 2, K, B, H] as [..., 2, K, B / 64, H / 64, 64, 64]; numbers along the last dimension share a scale."""
    *outer, size, h = blocks.shape
    tiles = blocks.reshape(*outer, size // GROUP, GROUP, h // GROUP, GROUP)
    keys, values = (jnp.squeeze(x, -6) for x in jnp.split(tiles, 2, axis=-6))
    return jnp.stack([jnp.moveaxis(keys, -3, -1), jnp.moveaxis(values, -3, -2)], axis=-6)


def _untiled(tiles):
    """The reverse of `_tiled`."""
    keys, values = (jnp.squeeze(x, -6) for x in jnp.split(tiles, 2, axis=-6))
    blocks = jnp.stack([jnp.moveaxis(keys, -1, -3), jnp.moveaxis(values, -2, -3)], axis=-6)
    *outer, groups, _, channels, _ = blocks.shape
    return blocks.reshape(*outer, groups * GROUP, channels * GROUP)
