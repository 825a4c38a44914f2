"""The order in which cached tokens stay, by an eviction method's priorities."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.kv.eviction.base import Cached, EvictionMethod
from ksana_jax.kv.moves import Evictions


def kept_slots(order: jax.Array, asked: Evictions) -> jax.Array:
    """Returns the slots [n, Lg, K, C] whose tokens move to slots 0, 1, ...: rising up to num_kept, then any."""
    num_slots = order.shape[-1]
    stays = jnp.arange(num_slots) < asked.num_kept[:, None, None, None]
    return jnp.minimum(jnp.sort(jnp.where(stays, order, num_slots)), num_slots - 1)


def ranked(cached: Cached, asked: Evictions, method: EvictionMethod) -> jax.Array:
    """Returns the slots [n, Lg, K, C] of each head in the order in which their tokens stay; with `per_head` the slots
    of all heads that share a budget together, see `together`.

    Among equals, older tokens stay.
    """
    slots = jnp.arange(cached.keys.shape[3])
    num_tokens, num_sinks, num_recent = (
        x[:, None, None, None] for x in (asked.num_tokens, asked.num_sinks, asked.num_recent)
    )
    priority = jnp.broadcast_to(method.priority(cached, jnp), cached.keys.shape[:-1]).astype(jnp.float32)
    priority = jnp.where(jnp.isnan(priority), -jnp.inf, priority)
    stays = (slots < num_sinks) | (slots >= num_tokens - num_recent)
    # Above all others, and below all others.
    classes = jnp.where(slots >= num_tokens, 2, jnp.where(stays, 0, 1))
    keys = -priority, jnp.broadcast_to(classes, priority.shape)
    if method.per_head:
        keys = (together(x, method) for x in keys)
    return jnp.lexsort(tuple(keys))


def together(x: jax.Array, method: EvictionMethod) -> jax.Array:
    """[n, Lg, K, C] to [n, Lg, 1, C * K] or, with `across_layers`, to [n, 1, 1, C * Lg * K]: slots in their order."""
    if method.across_layers:
        return jnp.moveaxis(x, 3, 1).reshape(len(x), 1, 1, -1)
    return jnp.swapaxes(x, 2, 3).reshape(*x.shape[:2], 1, -1)


def apart(x: jax.Array, method: EvictionMethod, shape: tuple[int, ...]) -> jax.Array:
    """Undoes `together`. shape: [n, Lg, K, C]."""
    n, layers, heads, _ = shape
    if method.across_layers:
        return jnp.moveaxis(x.reshape(n, -1, layers, heads), 1, 3)
    return jnp.swapaxes(x.reshape(n, layers, -1, heads), 2, 3)
