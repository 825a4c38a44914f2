"""Ragged paged attention in plain jnp and float32: every slot of the table, one mask, one softmax.

Kernels are tested against it. It is small and obvious rather than fast: one tile after the other, its keys and values
gathered and its whole score matrix held.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import int4, latent8
from pallas_kernels.contract import Call, Kernel, Pool, Result
from pallas_kernels.patterns import Pattern


def attend(call: Call, work: None = None, *, tuning: None = None) -> Result:
    """Attends a call. Takes all options.

    Raises:
      NotImplementedError: the pool has packed codes, which their codec decodes.

    Source: PagedAttention, arXiv:2309.06180, section 4.
    """
    if call.pool.levels is not None:
        raise NotImplementedError("packed codes; the reference reads numbers and codes with scales")
    if call.by_head:
        return _attend_by_head(call)
    options, num_heads = call.options, call.q.shape[2]
    sinks = jnp.full(num_heads, -jnp.inf) if options.sinks is None else options.sinks.astype(jnp.float32)

    def attend_tile(tile):
        v, seen, scores = _gather(call, tile)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        top = jnp.maximum(scores.max(axis=-1), sinks)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp(scores - top[..., None])
        total = weights.sum(axis=-1) + jnp.exp(sinks - top)
        none = ~seen.any(axis=-1)[:, None]
        weights = jnp.where(none[..., None], 0.0, weights / jnp.where(none, 1.0, total)[..., None])
        out = jnp.einsum("QNT,TNH->QNH", weights, _per_head(v, num_heads), precision="highest")
        lse = jnp.where(none, -jnp.inf, top + jnp.log(jnp.where(none, 1.0, total)))
        return out, lse

    out, lse = jax.lax.map(attend_tile, _tiles(call))
    return Result(
        out.astype(call.out_dtype),
        lse if options.return_lse else None,
        probability_mass(call, lse) if options.return_mass else None,
    )


def _attend_by_head(call: Call) -> Result:
    """Attends each kv head and its query heads as a call of their own."""
    options, found = call.options, []
    for head in range(call.pool.kv.shape[3]):
        queries = slice(head * call.group, (head + 1) * call.group)
        here = slice(head, head + 1)
        found.append(
            attend(
                call.replace(
                    q=call.q[:, :, queries],
                    pool=Pool(*(None if x is None else x[:, :, :, here] for x in call.pool[:2])),
                    tables=call.tables[:, head],
                    starts=call.starts[:, head],
                    q_sink=None if options.q_sink is None else options.q_sink[:, :, :, queries],
                    sinks=None if options.sinks is None else options.sinks[queries],
                )
            )
        )
    out, lse, mass = zip(*found, strict=True)
    return Result(
        jnp.concatenate(out, 2),
        jnp.concatenate(lse, 2) if options.return_lse else None,
        jnp.concatenate(mass, 1) if options.return_mass else None,
    )


def probability_mass(call: Call, lse: jax.Array) -> jax.Array:
    """Computes `Result.mass` of a call from its log-sum-exp [S, Q, N], which includes the learned sink logits."""
    num_kv_heads = call.pool.kv.shape[3]

    def weigh(tile):
        tile, lse, factor = tile
        _, seen, scores = _gather(call, tile)
        weights = jnp.where(seen[:, None], jnp.exp(scores - lse[..., None]), 0.0) * factor[:, None, None]
        return weights.reshape(weights.shape[0], num_kv_heads, -1, weights.shape[-1]).sum(axis=(0, 2))

    factor = call.options.mass_factor
    return jax.lax.map(weigh, (_tiles(call), lse, jnp.ones(call.positions.shape) if factor is None else factor))


def _tiles(call: Call):
    """Returns the arrays of a call that differ between tiles."""
    return call.tables, call.starts, call.positions, call.q, call.options.q_sink


def _gather(call: Call, tile):
    """Returns for a tile's T = P * B slots values [T, K, H], visibility [Q, T] and scores [Q, N, T]."""
    table, start, position, q, q_sink = tile
    pool, pattern = call.pool, call.effective_pattern
    kv_pos = (start[:, None] + jnp.arange(pool.kv.shape[4])).reshape(-1)
    seen = pattern.visible(position[:, None], kv_pos)
    blocks = pool.kv[table, call.layer].astype(jnp.float32)  # [P, 2 or 1, K, B, H]
    if pool.scales is not None:
        codes, scales = pool.kv[table, call.layer], pool.scales[table, call.layer]
        if pool.rotated is not None:
            blocks = latent8.dequantise(codes, scales, pool.rotated[table, call.layer])
        else:
            blocks = int4.dequantise(codes, scales) if codes.dtype == jnp.int4 else blocks * scales[..., None]
    slots = blocks.transpose(1, 0, 3, 2, 4).reshape(-1, kv_pos.shape[0], *blocks.shape[2::2])
    # A weight of 0 does not silence a NaN in a slot that was never written.
    slots = jnp.where(seen.any(axis=0)[:, None, None], slots, 0.0)
    k, v = slots[0], slots[-1]
    if call.options.key_rope is not None:
        k = _rotated(k, call.options.key_rope, kv_pos).astype(call.q.dtype).astype(jnp.float32)
    return v, seen, _scores(q, q_sink, k, position, kv_pos, pattern, call.options.soft_cap)


def _rotated(k, rope, kv_pos):
    """Rotates keys [T, K, H] by the rows of tables [C, H / 2] for their positions [T]."""
    cos, sin = (table.at[kv_pos].get(mode="clip")[:, None] for table in rope)
    a, b = jnp.split(k, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _scores(q, q_sink, k, position, kv_pos, pattern: Pattern, soft_cap):
    """Scores [Q, N, T] of queries [Q, N, H] and sink queries [Q, J, N, H] (or None) with keys [T, K, H]."""
    q = q.astype(jnp.float32)
    k = _per_head(k, q.shape[1])
    scores = jnp.einsum("QNH,TNH->QNT", q, k, precision="highest")
    if q_sink is not None:
        q_sink = q_sink.astype(jnp.float32)
        repositioned = pattern.repositioned(position[:, None], kv_pos)
        for j in range(q_sink.shape[1]):
            with_sink = jnp.einsum("QNH,TNH->QNT", q_sink[:, j], k, precision="highest")
            here = repositioned & (jnp.minimum(kv_pos, q_sink.shape[1] - 1) == j)
            scores = jnp.where(here[:, None], with_sink, scores)
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _per_head(x, num_heads: int):
    """Repeats [T, K, H] to [T, N, H]: each kv head for the query heads of its group."""
    return jnp.repeat(x, num_heads // x.shape[1], axis=1)


KERNEL = Kernel(attend, None)
