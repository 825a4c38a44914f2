"""The paged KV pool on the device. Knows blocks and slots, not their owners.

The leaf "kv" [M, L, X, K, B, H] holds keys (0) and values (1) of all layers, or latents, which are both (X is 1): a
block moves to another memory in one copy, and a step donates one large buffer. Scales are leaves [M, L, X, K, B, ...].
Leaves are read through flat views [M*L*X*K, B, ...]: gathering pieces [B, H], heads outermost, was 1.4 times faster on
CPU than gathering tokens (34 against 46 ms: 8 layers, 32 rows of 256 tokens, jax 0.10.2, two shared cores).
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.layout import EXACT, HIDDEN, INDEX_KEY, LOW, SCORE, SUMMARY, TEXT_POSITION


@flax.struct.dataclass
class KVCache:
    """The blocks of all layers.

    leaves: arrays [M, ...] by name, see `kv.layout.Leaf`. On a CPU, integers hold the bits of the narrower float types.
    codec: how keys and values are encoded in them, see `KVLayout`.
    states: the slots of recurrent layers, arrays [slots, ...] by name, see `kv.state_layout`; empty without any.
    inputs: between a step with drafts and their verification, of each recurrent layer, see `ops.states.paged_recur`.
    """

    leaves: dict[str, jax.Array]
    codec: str = flax.struct.field(pytree_node=False)
    states: dict[str, jax.Array] = flax.struct.field(default_factory=dict, kw_only=True)
    inputs: tuple[dict[str, jax.Array], ...] = flax.struct.field(default=(), kw_only=True)

    @property
    def kv(self) -> jax.Array:
        """Keys and values [M, L, X, K, B, H], or their codes; packed ones take less than H."""
        return self.leaves["kv"]

    def with_leaves(self, leaves: dict[str, jax.Array]) -> KVCache:
        """Returns the pool with other blocks."""
        return self.replace(leaves=leaves)  # pyright: ignore[reportAttributeAccessIssue]

    def with_kv(self, kv: jax.Array) -> KVCache:
        """Returns the pool with other keys and values."""
        return self.with_leaves(self.leaves | {"kv": kv})

    @property
    def num_blocks(self) -> int:
        return self.kv.shape[0]

    @property
    def block_size(self) -> int:
        return self.kv.shape[4]

    @property
    def unrotated_keys(self) -> bool:
        """True if keys are stored before the rotation, for all layers and eviction methods."""
        return False

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def _rows(self, layer: int | jax.Array, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns indices [..., K] into the flat views of the keys and values of blocks [...]."""
        _, num_layers, sides, num_kv_heads, *_ = self.kv.shape
        keys = ((block_ids * num_layers + layer) * sides * num_kv_heads)[..., None] + jnp.arange(num_kv_heads)
        return keys, keys if sides == 1 else keys + num_kv_heads

    def _parts(self) -> tuple[KVCache, KVCache, int]:
        """Returns the pool's layers in full precision, the others, and how many of a group's are the former."""
        exact = self.leaves[EXACT]
        codes = {name: leaf for name, leaf in self.leaves.items() if name != EXACT}
        return KVCache({"kv": exact}, EXACT_CODECS[exact.dtype.name]), KVCache(codes, self.codec), exact.shape[1]

    def write(self, layer: int | jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> KVCache:
        """Encodes and stores k and v [T, K, H] of one layer at slots [T]; slots at or beyond M*B are dropped."""
        if EXACT in self.leaves:
            exact, codes, num_exact = self._parts()
            # Writes to a layer that a part does not have are dropped; a negative index would count from the end.
            of_codes = jnp.where(layer < num_exact, codes.kv.shape[1], layer - num_exact)
            exact, codes = exact.write(layer, slots, k, v), codes.write(of_codes, slots, k, v)
            return self.with_leaves(codes.leaves | {EXACT: exact.kv})
        block_ids, offsets = slots // self.block_size, (slots % self.block_size)[:, None]
        heads, leaves = jnp.arange(self.kv.shape[3]), dict(self.leaves)
        for index, x in enumerate((k, v)[: self.kv.shape[2]]):
            for name, part in find_codec(self.codec).encode(x, jnp).items():
                at = leaves[name].at[block_ids[:, None], layer, index, heads, offsets]
                leaves[name] = at.set(stored(part, leaves[name].dtype), mode="drop")
        return self.with_leaves(leaves)

    def enter(self, layer: int, slots: jax.Array, text_positions: jax.Array) -> KVCache:
        """Initialises eviction data of tokens [T] at slots [T]: no attention received, text positions, one per slot."""
        block_ids, offsets = slots // self.block_size, (slots % self.block_size)[:, None]
        at = block_ids[:, None], layer, 0, jnp.arange(self.kv.shape[3]), offsets
        new = {SCORE: 0.0, TEXT_POSITION: text_positions[:, None], HIDDEN: False, LOW: 0}
        leaves = {name: leaf.at[at].set(new[name], mode="drop") for name, leaf in self.leaves.items() if name in new}
        return self.with_leaves(self.leaves | leaves)

    def read(self, layer: int | jax.Array, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads and decodes keys and values [..., K, P*B, H] of one layer from blocks [..., P]."""
        if EXACT in self.leaves:
            exact, codes, num_exact = self._parts()
            if isinstance(layer, int):
                return exact.read(layer, block_ids) if layer < num_exact else codes.read(layer - num_exact, block_ids)
            parts = ((exact, layer), (codes, layer - num_exact))

            def read(part: KVCache, layer: jax.Array):
                return tuple(x.astype(jnp.float32) for x in part.read(layer, block_ids))

            return jax.lax.cond(layer < num_exact, *(functools.partial(read, *part) for part in parts))
        shape = (*block_ids.shape[:-1], self.kv.shape[3], block_ids.shape[-1] * self.block_size)
        rows = (jnp.moveaxis(r, -1, -2) for r in self._rows(layer, block_ids))  # heads before blocks
        k, v = (self.decoded(_Gathered(self.leaves, r, shape)) for r in rows)
        return k, v

    def read_heads(self, layer: int | jax.Array, block_ids: jax.Array, heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads and decodes keys and values [..., P*B, H] of one kv head in each of blocks [..., P]."""
        shape = (*block_ids.shape[:-1], block_ids.shape[-1] * self.block_size)
        rows = (jnp.take_along_axis(r, heads[..., None], axis=-1)[..., 0] for r in self._rows(layer, block_ids))
        k, v = (self.decoded(_Gathered(self.leaves, r, shape)) for r in rows)
        return k, v

    def summaries(self, layer: int | jax.Array, block_ids: jax.Array) -> jax.Array:
        """Reads the summaries [S, K, P, *summary_shape] of blocks [S, P] in one layer."""
        leaf = self.leaves[SUMMARY]
        _, num_layers, _, heads, *shape = leaf.shape
        at = (block_ids * num_layers + layer)[:, None, :] * heads + jnp.arange(heads)[:, None]
        return leaf.reshape(-1, *shape)[at]

    def with_summaries(self, layer: int | jax.Array, block_ids: jax.Array, summaries: jax.Array) -> KVCache:
        """Stores the summaries [n, K, *summary_shape] of blocks [n] in one layer; drops blocks that do not exist."""
        leaf = self.leaves[SUMMARY].at[block_ids, layer, 0].set(summaries, mode="drop")
        return self.with_leaves(self.leaves | {SUMMARY: leaf})

    @property
    def of_index(self) -> KVCache:
        """Returns the keys of the layers' indexers as a pool of one side and head."""
        leaf = self.leaves[INDEX_KEY]
        return KVCache({"kv": leaf}, EXACT_CODECS[leaf.dtype.name])

    def of_slots(self, slots: jax.Array) -> KVCache:
        """Reads latents of slots [n] into a pool of one layer with blocks of one token. Slot o of a block b in layer l
        of L is (b * L + l) * B + o."""
        leaves = {name: leaf.reshape(-1, *leaf.shape[5:]) for name, leaf in self.leaves.items() if name != INDEX_KEY}
        return self.with_leaves({name: x[slots][:, None, None, None, None] for name, x in leaves.items()})

    def decoded(self, parts: dict[str, jax.Array]) -> jax.Array:
        """Decodes parts of the codec's leaves to keys or values."""
        return find_codec(self.codec).decode(parts, jnp)


# Codecs of layers in full precision, by how the pool stores them.
EXACT_CODECS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint16": "bf16"}


class _Gathered(dict):
    """Pieces [*shape, ...] of the leaves that a codec reads.

    rows: [..., K, P], indices into the flat views of leaves. shape: (..., K, P*B).
    """

    def __init__(self, leaves: dict[str, jax.Array], rows: jax.Array, shape: tuple[int, ...]):
        self._leaves, self._at, self._shape = leaves, rows, shape

    def __missing__(self, name: str) -> jax.Array:
        leaf = self._leaves[name]
        return leaf.reshape(-1, *leaf.shape[4:])[self._at].reshape(*self._shape, *leaf.shape[5:])


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns encoded numbers as a leaf stores them: unchanged, or as bits."""
    return x.view(dtype) if jnp.issubdtype(dtype, jnp.unsignedinteger) else x.astype(dtype)
