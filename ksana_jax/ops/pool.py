"""The paged KV pool on the device. Knows blocks and slots; who owns them is the host's business.

One array [M, L, 2, K, B, H] holds keys (0) and values (1) of all layers, so that moving a block to another memory is
one contiguous copy, and the compiled step has one large buffer to donate. It is read and written through a flat view
[M*L*2*K, B, H]: gathering whole [B, H] pieces with the heads outermost was 1.4 times faster on CPU than gathering
tokens (34 against 46 ms for 8 layers, 32 rows of 256 tokens, jax 0.10.2 on two shared cores).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
    """Keys and values of all layers.

    blocks: [M, L, 2, K, B, H] in float32, float16 or bfloat16; on CPU bfloat16 rests as its bits in uint16, because
      XLA:CPU converts a whole bfloat16 pool at each scatter (110 ms for 128 MB on jax 0.10.2, against 0.01 ms for
      uint16 and float16).
    """

    blocks: jax.Array

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def block_size(self) -> int:
        return self.blocks.shape[4]

    def _flat(self) -> jax.Array:
        return self.blocks.reshape(-1, *self.blocks.shape[4:])

    def _rows(self, layer: int, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Indices [..., K] into the flat view of keys and of values of blocks [...]."""
        _, num_layers, _, num_kv_heads, _, _ = self.blocks.shape
        keys = ((block_ids * num_layers + layer) * 2 * num_kv_heads)[..., None] + jnp.arange(num_kv_heads)
        return keys, keys + num_kv_heads

    def write(self, layer: int, slots: jax.Array, k: jax.Array, v: jax.Array) -> KVCache:
        """Stores k and v [T, K, H] of one layer at slots [T]; slots at or beyond M*B are dropped."""
        block_ids, offsets = slots // self.block_size, (slots % self.block_size)[:, None]
        k_rows, v_rows = self._rows(layer, block_ids)
        flat = self._flat()
        flat = flat.at[k_rows, offsets].set(self._to_rest(k), mode="drop")
        flat = flat.at[v_rows, offsets].set(self._to_rest(v), mode="drop")
        return KVCache(flat.reshape(self.blocks.shape))

    def read(self, layer: int, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [..., K, P*B, H] of one layer in blocks [..., P]; float32 where bits rest in uint16."""
        _, _, _, num_kv_heads, block_size, head_dim = self.blocks.shape
        shape = (*block_ids.shape[:-1], num_kv_heads, block_ids.shape[-1] * block_size, head_dim)
        rows = (jnp.moveaxis(r, -1, -2) for r in self._rows(layer, block_ids))  # heads before blocks
        k, v = (self._from_rest(self._flat()[r].reshape(shape)) for r in rows)
        return k, v

    def _to_rest(self, x: jax.Array) -> jax.Array:
        if self.blocks.dtype == jnp.uint16:
            return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
        return x.astype(self.blocks.dtype)

    def _from_rest(self, x: jax.Array) -> jax.Array:
        if self.blocks.dtype == jnp.uint16:
            # A shift widens bfloat16 to float32; XLA:CPU multiplies float32 faster than small bfloat16 batches.
            return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
        return x


def storage_dtype(dtype: str, platform: str):
    """Type in which keys and values of an engine dtype ("f32", "bf16", "f16") rest on a platform."""
    if dtype == "bf16":
        return jnp.uint16 if platform == "cpu" else jnp.bfloat16
    return jnp.float16 if dtype == "f16" else jnp.float32


def make_cache(num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype) -> KVCache:
    """An empty pool of zeros [num_blocks, L, 2, K, B, H]."""
    return KVCache(jnp.zeros((num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), dtype))
