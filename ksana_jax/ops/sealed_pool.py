"""The pool of block codecs: blocks of bytes, which hold codes of some layers or exact keys or values of fewer.

The leaf "kv" [M, 1, 1, K, W] has W bytes for each kv head. In a block of codes they are [Lg, n], for each layer of the
group the n bytes of `Sealing.encoded`; in a block of exact tokens [sides, B, H] numbers. A group of layers has blocks
of one kind, so that blocks need no mark of their kind, and block moves need not know it.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.devices.features import ALL_FEATURES, Features
from ksana_jax.kv.codecs.base import numbers
from ksana_jax.kv.layout import SealedBlocks
from ksana_jax.ops.pool import KVCache

# Blocks that are encoded at a time.
SEALED_AT_ONCE = 8
# Axes of the pool that an index has: block, head, and byte. XLA:CPU copies the pool where it is reshaped in a loop.
PLACE = (0, 3, 4)


@flax.struct.dataclass
class SealedCache(KVCache):
    """The blocks of all layers, with a block codec.

    blocks: how they hold codes and exact tokens. size: B, tokens in a block.
    """

    blocks: SealedBlocks = flax.struct.field(pytree_node=False)
    size: int = flax.struct.field(pytree_node=False)

    @property
    def block_size(self) -> int:
        return self.size

    @property
    def unrotated_keys(self) -> bool:
        return self.blocks.sealing.k.unrotated_keys

    @property
    def _vector_bytes(self) -> int:
        return self.blocks.head_dim * np.dtype(self.blocks.exact).itemsize

    def write_side(self, at: Any, slots: jax.Array, x: jax.Array) -> SealedCache:
        """Stores exact keys or values [T, K, H] at slots [T]; slots at or beyond M*B are dropped.

        Args:
          at: index of their layer and side in the group of layers.
        """
        starts = (at * self.size + slots % self.size) * self._vector_bytes
        pieces = x.astype(self.blocks.exact).view(jnp.uint8)
        return self._put(pieces, (slots // self.size)[:, None], starts[:, None])

    def read_side(self, at: Any, block_ids: jax.Array) -> jax.Array:
        """Reads exact keys or values [..., K, P*B, H], in float32, from blocks [..., P]."""
        size = self.size * self._vector_bytes
        pieces = self._pieces(block_ids, at * size, size)
        pieces = pieces.reshape(*pieces.shape[:-2], -1, self.blocks.head_dim, np.dtype(self.blocks.exact).itemsize)
        return _floats(pieces, self.blocks.exact)

    def read_codes(self, at: Any, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads and decodes keys and values [..., K, P*B, H] of one layer from blocks [..., P] of codes."""
        sealing, h = self.blocks.sealing, self.blocks.head_dim
        size = sealing.head_bytes(self.size, h)
        k, v = sealing.decoded(self._pieces(block_ids, at * size, size), self.size, h, jnp)
        return k.reshape(*k.shape[:-3], -1, h), v.reshape(*v.shape[:-3], -1, h)

    def seal(
        self, at: Any, sides: tuple[Any, Any], full: Any, exact: tuple[Any, Any], features: Features = ALL_FEATURES
    ) -> SealedCache:
        """Encodes the blocks of one layer that a step has filled.

        Args:
          at: index of the layer among the layers of codes. sides: indices of its exact keys and values.
          full: [F] blocks for the codes, M beyond their number. exact: [F] the blocks of exact keys and of values.
          features: operations that programs may use on the device.
        """
        sealing, h = self.blocks.sealing, self.blocks.head_dim
        some = min(len(full), SEALED_AT_ONCE)
        full, *exact_ids = (
            jnp.pad(ids, (0, -len(ids) % some), constant_values=self.num_blocks) for ids in (full, *exact)
        )
        size = sealing.head_bytes(self.size, h)

        def encode(i, kv):
            cache = self.with_kv(kv)
            ids, *of_sides = (jax.lax.dynamic_slice_in_dim(x, i * some, some) for x in (full, *exact_ids))
            k, v = (cache.read_side(side, x[:, None]) for side, x in zip(sides, of_sides, strict=True))
            pieces = sealing.encoded(k, v, jnp)
            return cache._put(pieces, ids[:, None], jnp.full((some, 1), at * size, jnp.int32)).kv

        num_full = jnp.sum(full < self.num_blocks)
        # Blocks beyond their number are dropped.
        return self.with_kv(features.loop(-(-num_full // some), len(full) // some, encode, self.kv))

    def with_kv(self, kv: jax.Array) -> SealedCache:
        return self.replace(leaves=self.leaves | {"kv": kv})  # pyright: ignore[reportAttributeAccessIssue]

    def read_all(self, block_ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Reads the codes [n, Lg, K, P, size] of all layers of blocks [n, P], and decodes them to keys and values
        [n, Lg, K, P*B, H]."""
        sealing, h, layers = self.blocks.sealing, self.blocks.head_dim, self.blocks.num_layers
        size = sealing.head_bytes(self.size, h)
        codes = self.kv[block_ids, 0, 0, :, : layers * size]
        codes = jnp.swapaxes(codes.reshape(*codes.shape[:-1], layers, size), 1, 3)
        k, v = sealing.decoded(codes, self.size, h, jnp)
        return codes, tuple(x.reshape(*x.shape[:3], -1, h) for x in (k, v))

    def with_moved(
        self, targets: jax.Array, source: jax.Array, codes: jax.Array, kv: tuple[jax.Array, jax.Array]
    ) -> SealedCache:
        """Moves tokens of rows to other slots. Blocks whose tokens stay together keep their codes, others are encoded.

        Args:
          targets: [n, P], the rows' blocks afterwards; those beyond their number are dropped.
          source: [n, Lg, K, P*B], the slots that tokens come from. codes, kv: of `read_all`.
        """
        source = source.reshape(*codes.shape[:4], self.size)
        first, within = source[..., :1], jnp.arange(self.size)
        stays = ((source == first + within) & (first % self.size == 0)).all(axis=-1, keepdims=True)
        moved = (jnp.take_along_axis(x, source.reshape(*x.shape[:4], 1), axis=3) for x in kv)
        k, v = (x.reshape(*source.shape, x.shape[-1]) for x in moved)
        old = jnp.take_along_axis(codes, first // self.size, axis=3)
        new = jnp.where(stays, old, self.blocks.sealing.encoded(k, v, jnp))
        new = jnp.swapaxes(new, 1, 3)
        new = new.reshape(*new.shape[:3], -1)
        return self.with_kv(self.kv.at[targets, 0, 0, :, : new.shape[-1]].set(new, mode="drop"))

    def _pieces(self, block_ids: jax.Array, start: Any, size: int) -> jax.Array:
        """Reads bytes [..., K, P, size] that begin at `start` in each head of blocks [..., P]."""
        heads = jnp.arange(self.kv.shape[3])[:, None]
        ids, heads = jnp.broadcast_arrays(block_ids[..., None, :], heads)
        at = jnp.stack([ids, heads, jnp.full_like(ids, start)], axis=-1)
        dims = jax.lax.GatherDimensionNumbers(
            offset_dims=(at.ndim - 1,), collapsed_slice_dims=(0, 1, 2, 3), start_index_map=PLACE
        )
        return jax.lax.gather(self.kv, at, dims, (1, 1, 1, 1, size), mode="clip")

    def _put(self, pieces: jax.Array, block_ids: jax.Array, starts: jax.Array) -> SealedCache:
        """Writes bytes [n, K, size] to blocks [n, 1], from starts [n, 1] on; drops blocks that do not exist."""
        ids, heads, starts = jnp.broadcast_arrays(block_ids, jnp.arange(self.kv.shape[3]), starts)
        dims = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(2,), inserted_window_dims=(0, 1, 2, 3), scatter_dims_to_operand_dims=PLACE
        )
        at = jnp.stack([ids, heads, starts], axis=-1)
        return self.with_kv(jax.lax.scatter(self.kv, at, pieces, dims, mode="drop"))


def _floats(pieces: jax.Array, dtype: str) -> jax.Array:
    """Returns the numbers [...] in float32 of a float type whose bytes are [..., itemsize]."""
    wide = jnp.uint32 if dtype == "float32" else jnp.uint16
    shifted = (pieces[..., i].astype(wide) << wide(8 * i) for i in range(pieces.shape[-1]))
    return numbers(functools.reduce(jnp.bitwise_or, shifted), dtype, jnp)
