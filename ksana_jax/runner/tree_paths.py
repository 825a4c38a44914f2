"""Verifies drafts that may branch, and moves keys and values of the accepted tokens, the nodes on one path through a
tree, to the slots of a text without branches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.models.params import Params
from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.token_programs import OutputHead
from ksana_jax.runner.verification import VerificationKey, verification_arguments, verify_tokens
from ksana_jax.sharding.specs import BY_HEAD, EVERYWHERE


def lower_trees(head: OutputHead, params: Params, cache: Any, num_groups: int, key: VerificationKey) -> Any:
    """Lowers `verify_trees` for a pool with some groups of layers."""
    assert key.part is not None
    run = head.placement.jit(
        functools.partial(verify_trees, head=head, key=key), returns=(BY_HEAD, EVERYWHERE), donated=0
    )
    slots = jax.ShapeDtypeStruct((num_groups, key.part.count * key.part.width), jnp.int32)
    return lower(run, cache, slots, *verification_arguments(head, params, key))


def verify_trees(
    cache: KVCache, slots: jax.Array, *arguments: Any, head: OutputHead, key: VerificationKey
) -> tuple[KVCache, jax.Array]:
    """Verifies drafts and moves accepted tokens; accepted tokens of a run stay in place.

    Args:
      slots: [Gk, S * W] of a step's tokens; M * B for padding. arguments: of `verify_tokens`.

    Returns:
      The pool, and a vector of `verification_packing`.
    """
    report, path = verify_tokens(*arguments, head=head, key=key)
    assert path is not None
    return moved_to_path(cache, slots, path), report


def moved_to_path(cache: KVCache, slots: jax.Array, path: jax.Array) -> KVCache:
    """Moves the cached content of some tokens of each tile to the slots of others, for all layers.

    Args:
      slots: [Gk, S * W] of a step's tokens; M * B for padding.
      path: [S, W] for each slot of a tile the token of the tile that moves there; its own number where it stays.
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
