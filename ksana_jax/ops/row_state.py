"""Data that an eviction method stores next to keys and values as a step's tokens enter their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ksana_jax.kv.layout import SCORE, STATE
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.pool import KVCache


def entered(cache: KVCache, q: jax.Array, context: AttentionContext, scale: float) -> KVCache:
    """Initialises eviction data of a step's tokens, and adds what their queries q [T, N, H] add to the states of rows.

    A row's state is the sum over its blocks: each holds the part of its own tokens, and travels with them.
    """
    assert context.observer is not None
    slots, positions, method = context.batch.slots, context.batch.positions, context.observer.method
    cache = cache.enter(context.layer, slots, positions)
    if SCORE in cache.leaves and (scores := cache.leaves[SCORE]).shape[2] > 1:  # one of several sums is initialised
        at = scores.at[slots // cache.block_size, context.layer, :, :, slots % cache.block_size]
        cache = cache.with_leaves(cache.leaves | {SCORE: at.set(0, mode="drop")})
    if STATE not in cache.leaves:
        return cache
    leaf = cache.leaves[STATE]
    block, offset = slots // cache.block_size, slots % cache.block_size
    by_kv_head = (q.astype(jnp.float32) * scale).reshape(len(q), leaf.shape[3], -1, q.shape[-1])
    # A block begins with its first token.
    new = jnp.where(offset == 0, block, cache.num_blocks)
    leaf = leaf.at[new, context.layer, 0].set(0, mode="drop")
    leaf = leaf.at[block, context.layer, 0].add(method.observe(by_kv_head, positions, jnp), mode="drop")
    return cache.with_leaves(cache.leaves | {STATE: leaf})


def scored(cache: KVCache, context: AttentionContext, masses: Sequence[jax.Array]) -> KVCache:
    """Adds attention weights to the scores of slots, or keeps the larger ones, see `EvictionMethod.score_reduction`.

    Args:
      masses: [S, K, P*B] or [S, X, K, P*B] of each part of the step; blocks may repeat.
    """
    assert context.observer is not None
    scores = cache.leaves[SCORE]
    for (_, _, tiles), mass in zip(context.shape.places(), masses, strict=True):
        at = scores.at[context.batch.block_tables[tiles], context.layer, *(0,) * (mass.ndim == 3)]
        pieces = jnp.moveaxis(mass.reshape(*mass.shape[:-1], -1, cache.block_size), -2, 1)
        scores = at.max(pieces) if context.observer.method.score_reduction == "max" else at.add(pieces)
    return cache.with_leaves(cache.leaves | {SCORE: scores})
