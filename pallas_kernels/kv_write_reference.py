"""Writes a step's keys and values into the paged pool in plain jax.numpy; kernels of `contract.Write` must equal it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Kernel, Pool, Write, Written

# Codes of quantised pools, and the largest of each.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
SMALLEST = 1e-30  # largest magnitude of a vector below which a largest code / magnitude could overflow


def check(call: Write) -> None:
    """Raises ValueError where shapes or types of a write do not fit together."""
    t, _, h = call.q.shape
    _, _, two, kv_heads, _, width = call.pool.kv.shape
    kv_shape = (t, kv_heads, h)
    if two != 2 or width != h or call.k.shape != kv_shape or call.v.shape != kv_shape or call.slots.shape != (t,):
        raise ValueError(
            f"q {call.q.shape}, k {call.k.shape}, v {call.v.shape} and slots {call.slots.shape} do not fit pool "
            f"{call.pool.kv.shape}: wanted [T, N, H], [T, K, H], [T, K, H], [T] and [M, L, 2, K, B, H]"
        )
    if h % 2:
        raise ValueError(f"head dim {h} is odd: rope turns pairs")
    for name, pair, lead in (("rope", call.rope, (t,)), ("sink_rope", call.sink_rope, (t, -1))):
        for table in pair or ():
            if len(table.shape) != len(lead) + 1 or table.shape[0] != t or table.shape[-1] != h // 2:
                raise ValueError(f"{name} has tables {table.shape}, not [{t}, {'J, ' * (len(lead) - 1)}{h // 2}]")
    for name, weight in (("q_norm", call.q_norm), ("k_norm", call.k_norm)):
        if weight is not None and weight.shape != (h,):
            raise ValueError(f"{name} has shape {weight.shape}, not ({h},)")
    call.pool.check_scales()


def _normed(x, weight, eps: float):
    if weight is None:
        return x
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)


def rotated(x, tables):
    """Rotates x [..., heads, H] by angles [..., H/2]."""
    cos, sin = (t[..., None, :].astype(jnp.float32) for t in tables)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def quantised(x, dtype=jnp.int8):
    """Codes [..., H] and float32 scales [...] of vectors x [..., H], symmetric: x is about code * scale.

    A scale is the largest magnitude of its vector over the largest code. Vectors below 1e-30 become zeros.
    """
    largest = LARGEST[jnp.dtype(dtype)]
    top = jnp.max(jnp.abs(x), axis=-1)
    codes = x * jnp.where(top < SMALLEST, 0.0, largest / top)[..., None]
    return (jnp.round(codes) if dtype == jnp.int8 else codes).astype(dtype), top * (1 / largest)


def write(call: Write, work: None = None, *, tuning: None = None) -> Written:
    """Norms and rotates queries and keys, and stores keys and values of one layer in the paged pool.

    Raises:
      ValueError: shapes or types do not fit together.
    """
    check(call)
    pool, scales, *_ = call.pool
    q, k, v = (x.astype(jnp.float32) for x in (call.q, call.k, call.v))
    q = _normed(q, call.q_norm, call.eps) * call.q_scale
    k = rotated(_normed(k, call.k_norm, call.eps), call.rope)
    kv = jnp.stack([k, v], axis=1)
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    slots = jnp.where(call.slots < 0, num_blocks * block_size, call.slots)  # jax counts negative indices from the end
    at = (slots // block_size, call.layer, slice(None), slice(None), slots % block_size)
    if scales is not None:
        kv, new_scales = quantised(kv, pool.dtype)
        scales = scales.at[at].set(new_scales, mode="drop")
    pool = pool.at[at].set(kv.astype(pool.dtype), mode="drop")
    q_sink = None if call.sink_rope is None else rotated(q[:, None], call.sink_rope).astype(call.q.dtype)
    return Written(rotated(q, call.rope).astype(call.q.dtype), Pool(pool, scales), q_sink)


KERNEL = Kernel(write, None)
