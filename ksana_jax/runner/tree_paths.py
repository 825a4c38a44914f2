"""Moves keys and values of accepted draft tokens, the nodes on one way through a tree, to the slots of a text without
branches. Knows slots; no tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.ops.pool import KVCache
from ksana_jax.parallel.placement import Placement
from ksana_jax.parallel.specs import BY_HEAD
from ksana_jax.runner.compiling import lower


class PathKey(NamedTuple):
    """The part of a step with trees for which `moved_to_path` is compiled; see `Part`."""

    count: int
    width: int


def lower_moves(placement: Placement, cache: Any, num_groups: int, key: PathKey) -> Any:
    """Lowers `moved_to_path` for a pool with some groups of layers."""
    slots = jax.ShapeDtypeStruct((num_groups, key.count * key.width), jnp.int32)
    path = jax.ShapeDtypeStruct((key.count, key.width), jnp.int32)
    return lower(placement.jit(moved_to_path, returns=BY_HEAD, donated=0), cache, slots, path)


def moved_to_path(cache: KVCache, slots: jax.Array, path: jax.Array) -> KVCache:
    """Moves what the pool holds of some tokens of each tile to the slots of others, for all layers.

    Args:
      slots: [Gk, S * W] of a step's tokens; M * B for padding.
      path: [S, W] for each slot of a tile the token of the tile that it is for; its own number where it stays.
    """
    targets = slots.reshape(len(slots), *path.shape)
    sources = jnp.take_along_axis(targets, path[None], axis=2)
    stays = path[None] == jnp.arange(path.shape[1])
    none = cache.num_blocks * cache.block_size
    sources, targets = sources.reshape(-1), jnp.where(stays, none, targets).reshape(-1)
    leaves = {name: _moved(leaf, sources, targets) for name, leaf in cache.leaves.items()}
    return cache.replace(leaves=leaves)  # pyright: ignore[reportAttributeAccessIssue]


def _moved(leaf: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Copies between slots of a leaf [M, L, I, K, B, ...]; targets beyond it are dropped."""
    _, num_layers, parts, heads, size, *_ = leaf.shape
    all_heads = jnp.ix_(jnp.arange(num_layers), jnp.arange(parts), jnp.arange(heads))

    def at(slots: jax.Array) -> tuple[jax.Array, ...]:
        block, offset = (x[:, None, None, None] for x in (slots // size, slots % size))
        return (block, *(x[None] for x in all_heads), offset)

    # All are read before one is written.
    return leaf.at[at(targets)].set(leaf.at[at(sources)].get(mode="clip"), mode="drop")
