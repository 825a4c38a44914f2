"""Reasons why kernels cannot serve an engine: each kernel is asked about the shapes of an example of its calls."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.ops.kernels import CODES, FLOATS, LATENTS, Kernels, pool_of, unread_fields
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.requirements import Requirements
from pallas_kernels import contract


def unsupported(kernels: Kernels, needs: Requirements) -> str | None:
    """Returns the GPU kernels' own reason for an unsupported requirement, or None."""
    if needs.sides == 1 and kernels.latents is None:
        return "the pool has latents, which are keys and values at once; the kernels read both apart"
    return _unread_codec(needs) or lacks(kernels, needs)


def lacks(kernels: Kernels, needs: Requirements) -> str | None:
    """Returns the first unsupported requirement other than codecs, or None."""
    if reason := unread_fields(needs.pattern_fields):
        return reason
    if needs.alibi:
        return "scores have biases by distance (ALiBi), which the kernels do not add"
    if (method := needs.eviction) is not None:
        name = f"kv_eviction {type(method).__name__}"
        if method.hides:
            return f"{name} hides tokens (memory simulated), and the kernels read all"
        if method.low_codec:
            return f"{name} keeps tokens in {method.low_codec}, and the kernels read one codec"
        if method.observes and method.score_reduction != "sum":
            return f"{name} observes the largest weight of any query, and the kernels return sums"
        if method.observes and method.num_scores(1) > 1:
            return f"{name} observes several sums over queries, and the kernels return one"
        if method.custom_logits:
            return f"{name} observes other weights than those of the attention, which the kernels return"
    of_latents = kernels.latents if needs.sides == 1 else None
    for kernel, tile in ((of_latents or kernels.decode, 1), (of_latents or kernels.ragged, 32)):
        example = _example(needs, tile)
        # Layers that evict have no sinks in other places.
        rotating = (example.replace(q_sink=None, key_rope=_example_rope(needs)),) if _rotates_keys(needs) else ()
        for call in (example, *rotating):
            if reason := kernel.unsupported(call):
                return reason
    if kernels.kv_write is None or needs.sides == 1:  # XLA writes latents
        return None
    return kernels.kv_write.unsupported(_example_write(needs))


def _unread_codec(needs: Requirements) -> str | None:
    if needs.codec not in (read := (*FLOATS, *(CODES if needs.sides == 2 else LATENTS))):
        return f"keys and values are stored as {needs.codec}; the kernels read {', '.join(read)}"
    stored = {"uint16": "bfloat16"}.get(needs.dtype, needs.dtype)  # its bits, in the pool of a CPU
    query_dtype = needs.query_dtype or stored
    if query_dtype != stored if needs.codec in FLOATS else query_dtype == "float32":
        return f"queries in {query_dtype}, keys and values in {needs.dtype}: the kernels would round the queries"
    return None


def _example(needs: Requirements, tile: int) -> contract.Call:
    """Returns the shapes of a call with one tile."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=needs.query_dtype or needs.dtype)
    queries, num_sinks = (needs.num_heads, needs.head_dim), needs.num_repositioned_sinks
    method = needs.eviction
    options = contract.Options(
        q_sink=floats((1, tile, num_sinks, *queries)) if num_sinks else None,
        sinks=jax.ShapeDtypeStruct((needs.num_heads,), jnp.float32) if needs.sinks else None,
        soft_cap=1.0 if needs.soft_cap else None,
        return_mass=method is not None and method.observes,
        mass_factor=jax.ShapeDtypeStruct((1, tile), jnp.float32) if method and method.weights_queries else None,
    )
    table = ints((1, needs.num_kv_heads, 1) if needs.selects and tile == 1 else (1, 1))
    return contract.Call(
        floats((1, tile, *queries)), _example_pool(needs), table, table, ints((1, tile)), options=options
    )


def _example_write(needs: Requirements) -> contract.Write:
    """Returns the shapes of a write of two tokens."""
    array = jax.ShapeDtypeStruct
    dtype = needs.query_dtype or needs.dtype
    q, k = (array((2, n, needs.head_dim), dtype) for n in (needs.num_heads, needs.num_kv_heads))
    half = array((2, needs.head_dim // 2), jnp.float32)
    return contract.Write(q, k, k, _example_pool(needs), array((2,), jnp.int32), (half, half))


def _rotates_keys(needs: Requirements) -> bool:
    return needs.eviction is not None and needs.eviction.positions == "cache"


def _example_rope(needs: Requirements) -> tuple[Any, Any]:
    table = jax.ShapeDtypeStruct((needs.block_size, needs.head_dim // 2), jnp.float32)
    return table, table


def _example_pool(needs: Requirements) -> contract.Pool:
    shape = 2, 1, needs.sides, needs.num_kv_heads, needs.block_size
    arrays = find_codec(needs.codec).arrays(needs.head_dim)
    leaves: Any = {name: jax.ShapeDtypeStruct((*shape, *size), dtype) for name, (size, dtype) in arrays.items()}
    leaves["kv"] = jax.ShapeDtypeStruct(leaves["kv"].shape, needs.dtype)  # which may be bits
    return pool_of(KVCache(leaves, needs.codec))
