"""Data that an eviction method stores beside keys and values as a step's tokens enter their blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.kv.layout import STATE
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.pool import KVCache


def entered(cache: KVCache, q: jax.Array, context: AttentionContext, scale: float) -> KVCache:
    """Initialises eviction data of a step's tokens, and adds what their queries q [T, N, H] add to the states of rows.

    A row's state is the sum over its blocks: each holds the part of its own tokens, and travels with them.
    """
    assert context.observer is not None
    slots, positions, method = context.batch.slots, context.batch.positions, context.observer.method
    cache = cache.enter(context.layer, slots, positions)
    if STATE not in cache.leaves:
        return cache
    leaf = cache.leaves[STATE]
    block, offset = slots // cache.block_size, slots % cache.block_size
    by_kv_head = (q.astype(jnp.float32) * scale).reshape(len(q), leaf.shape[3], -1, q.shape[-1])
    # A block begins with its first token.
    new = jnp.where(offset == 0, block, cache.num_blocks)
    leaf = leaf.at[new, context.layer, 0].set(0, mode="drop")
    leaf = leaf.at[block, context.layer, 0].add(method.observe(by_kv_head, positions, jnp), mode="drop")
    return KVCache(cache.leaves | {STATE: leaf}, cache.codec)
