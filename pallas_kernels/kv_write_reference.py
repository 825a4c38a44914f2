"""The step's keys and values into the paged pool, in plain jax.numpy: the oracle and the contract of `kv_write`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Codes of quantised pools, and the largest of each.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
SMALLEST = 1e-30  # largest magnitude of a vector below which a largest code / magnitude could overflow


class Written(NamedTuple):
    """What a fused write returns. scales: None unless quantised. q_sink: None unless asked for."""

    q: jax.Array  # [T, N, H], normed, scaled and rotated
    pool: jax.Array  # [M, L, 2, K, B, H]
    scales: jax.Array | None  # [M, L, 2, K, B] float32
    q_sink: jax.Array | None  # [T, J, N, H]: q rotated by the angles of sink_rope instead


def check(q, k, v, pool, slots, rope, scales, q_norm, k_norm, sink_rope) -> None:
    """Raises ValueError where shapes or types of a write do not fit together."""
    t, _, h = q.shape
    _, _, two, kv_heads, _, width = pool.shape
    if two != 2 or width != h or k.shape != (t, kv_heads, h) or v.shape != k.shape or slots.shape != (t,):
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} and slots {slots.shape} do not fit pool {pool.shape}: "
            "wanted [T, N, H], [T, K, H], [T, K, H], [T] and [M, L, 2, K, B, H]"
        )
    if h % 2:
        raise ValueError(f"head dim {h} is odd: rope turns pairs")
    for name, pair, lead in (("rope", rope, (t,)), ("sink_rope", sink_rope, (t, -1))):
        for table in pair or ():
            if len(table.shape) != len(lead) + 1 or table.shape[0] != t or table.shape[-1] != h // 2:
                raise ValueError(f"{name} has tables {table.shape}, not [{t}, {'J, ' * (len(lead) - 1)}{h // 2}]")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (h,):
            raise ValueError(f"{name} has shape {weight.shape}, not ({h},)")
    if (pool.dtype in LARGEST) != (scales is not None):
        coded = " and ".join(map(str, LARGEST))
        raise ValueError(f"a pool of {pool.dtype} {'without' if scales is None else 'with'} scales: {coded} need them")
    if scales is not None and (scales.shape != pool.shape[:-1] or scales.dtype != jnp.float32):
        raise ValueError(f"scales are {scales.dtype}{scales.shape}, not float32{pool.shape[:-1]}")


def _normed(x, weight, eps: float):
    if weight is None:
        return x
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)


def _rotated(x, tables):
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


def kv_write(
    q, k, v, pool, slots, rope, *, layer, scales=None, q_norm=None, k_norm=None, eps=1e-6, q_scale=1.0, sink_rope=None
) -> Written:
    """Norms and rotates q and k, and stores k and v of one layer in the paged pool.

    Computed in float32 and rounded once. Rope turns pairs of halves, element i with i + H / 2, as Hugging Face
    checkpoints do and as this engine does; interleaved pairs are not served.

    Args:
      q: [T, N, H], and k, v: [T, K, H]; as the projections give them.
      pool: [M, L, 2, K, B, H] all layers, keys at [:, :, 0], values at [:, :, 1]; int8 or float8_e4m3fn if with scales.
      slots: [T] int32, block * B + offset, each at most once; those outside of [0, M * B) are not written.
      rope: cosines and sines [T, H / 2] float32 of the tokens' positions, with the model's factor (yarn) in them.
      layer: int or int32 scalar.
      scales: None, or [M, L, 2, K, B] float32: then k and v are stored as codes, one scale per token and head.
      q_norm, k_norm: None, or weights [H] of an RMS norm before the rotation, with eps.
      q_scale: factor of the returned queries, such as H**-0.5.
      sink_rope: None, or tables [T, J, H / 2] by which the queries are rotated a second time, for keys seen as if
        they were elsewhere (sinks).

    Returns:
      `Written`; slots that were not written keep their bits. q, q_sink are in q's dtype.

    Raises:
      ValueError: shapes or types that do not fit together.
    """
    check(q, k, v, pool, slots, rope, scales, q_norm, k_norm, sink_rope)
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    q32 = _normed(q32, q_norm, eps) * q_scale
    k32 = _rotated(_normed(k32, k_norm, eps), rope)
    kv = jnp.stack([k32, v32], axis=1)
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    slots = jnp.where(slots < 0, num_blocks * block_size, slots)  # jax counts negative indices from the end
    at = (slots // block_size, layer, slice(None), slice(None), slots % block_size)
    if scales is not None:
        kv, new_scales = quantised(kv, pool.dtype)
        scales = scales.at[at].set(new_scales, mode="drop")
    pool = pool.at[at].set(kv.astype(pool.dtype), mode="drop")
    q_sink = None if sink_rope is None else _rotated(q32[:, None], sink_rope).astype(q.dtype)
    return Written(_rotated(q32, rope).astype(q.dtype), pool, scales, q_sink)
