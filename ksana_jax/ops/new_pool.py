"""Creates the pool that a layout describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.devices.platforms import platform_of
from ksana_jax.kv.layout import KVLayout
from ksana_jax.native.callers import why_not_called
from ksana_jax.native.zeros import lazy_zeros
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.sealed_pool import SealedCache


def make_cache(layout: KVLayout, num_blocks: int, zeros: Callable[..., jax.Array] = jnp.zeros) -> KVCache:
    """Creates an empty pool: zeros [num_blocks, *leaf.shape] for each leaf, and the slots of recurrent layers."""
    leaves = {leaf.name: zeros((num_blocks, *leaf.shape), leaf.dtype) for leaf in layout.leaves}
    found = layout.states
    states = {} if found is None else {x.name: zeros((found.num_slots, *x.shape), x.dtype) for x in found.leaves}
    if layout.sealed is not None:
        return SealedCache(leaves, layout.codec, layout.sealed, layout.block_size, states=states)
    return KVCache(leaves, layout.codec, states=states)


def zeros_on(device: Any) -> Callable[..., jax.Array]:
    """Returns the function that makes zeros for a pool on a device. A CPU's take memory once they are written to."""
    return jnp.zeros if why_not_called(platform_of(device)) else lazy_zeros
