"""Ragged paged attention in plain jnp and float32: every slot of the table, one mask, one softmax.

It is what the kernels must equal and where their contract is written down. Small and obvious rather than fast: one tile
after the other, its keys and values gathered and its whole score matrix held.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import int4
from pallas_kernels.patterns import FULL, Pattern


def ragged_paged_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    *,
    layer: int | jax.Array,
    pattern: Pattern = FULL,
    q_sink: jax.Array | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    scales: jax.Array | None = None,
    return_lse: bool = False,
    out_dtype=None,
):
    """Attends the queries of each tile to the slots of its block table.

    Args:
      q: [S, Q, N, H], rotated and already scaled by H**-0.5. A tile is Q tokens of one row; decode has Q = 1.
      pool: [M, L, 2, K, B, H], keys and values of all layers; keys are [:, :, 0]. N is a multiple of K.
      tables: [S, P] int32 block ids, by rising text position; any valid id where absent.
      starts: [S, P] int32 text position of each block's first slot; FAR where absent. Blocks in between may be missing.
      positions: [S, Q] int32 text positions of the queries; -1 where padded.
      layer: index in [0, L); may be traced.
      pattern: which text positions a query sees; numbers may be traced.
      q_sink: [S, Q, J, N, H] or None. Where `pattern.moved`, the sink at text position j is scored with the query
        [:, :, min(j, J - 1)] of these instead of q. None moves nothing. Where `pattern.sink_moved` is 1, all J are the
        same.
      soft_cap: scores become cap * tanh(score / cap).
      sink_logits: [N] float32, one logit per head that joins the softmax's denominator and has no value.
      scales: [M, L, 2, K, B] float32 or None. With them the pool holds codes, int8 or float8_e4m3fn: a key or value is
        its code times its scale. For codes in int4 scales are bfloat16, laid out and applied as `int4` says.
      return_lse: also give the natural logarithm of the softmax's denominator, for merging.
      out_dtype: of the result; q's dtype by default.

    Returns:
      [S, Q, N, H], accumulated in float32, zeros where a query sees nothing (padding does not); with return_lse also
      [S, Q, N] float32, -inf where a query sees nothing. Slots that no query sees may hold anything.

    Source: PagedAttention, arXiv:2309.06180, section 4.
    """
    num_heads = q.shape[2]
    logits = jnp.full(num_heads, -jnp.inf) if sink_logits is None else sink_logits.astype(jnp.float32)
    queries = (q,) if q_sink is None else (q, q_sink)

    def attend(tile):
        table, start, position, *queries = tile
        k, v, seen, kv_pos = _gather(pool, scales, table, start, position, layer, pattern)
        scores = _scores(queries, k, position, kv_pos, pattern, soft_cap)  # [Q, N, T]
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        top = jnp.maximum(scores.max(axis=-1), logits)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp(scores - top[..., None])
        total = weights.sum(axis=-1) + jnp.exp(logits - top)
        none = ~seen.any(axis=-1)[:, None]
        weights = jnp.where(none[..., None], 0.0, weights / jnp.where(none, 1.0, total)[..., None])
        out = jnp.einsum("QNT,TNH->QNH", weights, _per_head(v, num_heads), precision="highest")
        lse = jnp.where(none, -jnp.inf, top + jnp.log(jnp.where(none, 1.0, total)))
        return out, lse

    out, lse = jax.lax.map(attend, (tables, starts, positions, *queries))
    out = out.astype(out_dtype or q.dtype)
    return (out, lse) if return_lse else out


def probability_mass(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    lse: jax.Array,
    *,
    layer: int | jax.Array,
    pattern: Pattern = FULL,
    q_sink: jax.Array | None = None,
    soft_cap: float | None = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """The attention weight that each slot got: what policies such as H2O (arXiv:2306.14048, section 4) add up.

    Args:
      lse: [S, Q, N] float32 as `ragged_paged_attention` returns it; it holds the learned sink logits if there are any.
      others: as there.

    Returns:
      [S, K, P * B] float32: exp(score - lse), summed over the tile's queries and the query heads of each kv head.
    """
    num_kv_heads = pool.shape[3]
    queries = (q,) if q_sink is None else (q, q_sink)

    def weigh(tile):
        table, start, position, lse, *queries = tile
        k, _, seen, kv_pos = _gather(pool, scales, table, start, position, layer, pattern)
        scores = _scores(queries, k, position, kv_pos, pattern, soft_cap)
        weights = jnp.where(seen[:, None], jnp.exp(scores - lse[..., None]), 0.0)
        return weights.reshape(weights.shape[0], num_kv_heads, -1, weights.shape[-1]).sum(axis=(0, 2))

    return jax.lax.map(weigh, (tables, starts, positions, lse, *queries))


def _gather(pool, scales, table, start, position, layer, pattern: Pattern):
    """Of a tile's T = P * B slots: keys and values [T, K, H], whether each query sees each [Q, T], positions [T]."""
    kv_pos = (start[:, None] + jnp.arange(pool.shape[4])).reshape(-1)
    seen = pattern.visible(position[:, None], kv_pos)
    blocks = pool[table, layer].astype(jnp.float32)  # [P, 2, K, B, H]
    if pool.dtype == jnp.int4:
        blocks = int4.dequantise(pool[table, layer], scales[table, layer])
    elif scales is not None:
        blocks *= scales[table, layer][..., None]
    slots = blocks.transpose(1, 0, 3, 2, 4).reshape(2, kv_pos.shape[0], pool.shape[3], pool.shape[5])
    # A weight of 0 does not silence a NaN in a slot that nobody has written.
    k, v = jnp.where(seen.any(axis=0)[:, None, None], slots, 0.0)
    return k, v, seen, kv_pos


def _scores(queries, k, position, kv_pos, pattern: Pattern, soft_cap):
    """[Q, N, T] of queries (q,) or (q, q_sink) and keys [T, K, H]."""
    q = queries[0].astype(jnp.float32)
    k = _per_head(k, q.shape[1])
    scores = jnp.einsum("QNH,TNH->QNT", q, k, precision="highest")
    if len(queries) == 2:
        q_sink = queries[1].astype(jnp.float32)
        moved = pattern.moved(position[:, None], kv_pos)
        for j in range(q_sink.shape[1]):
            with_sink = jnp.einsum("QNH,TNH->QNT", q_sink[:, j], k, precision="highest")
            here = moved & (jnp.minimum(kv_pos, q_sink.shape[1] - 1) == j)
            scores = jnp.where(here[:, None], with_sink, scores)
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _per_head(x, num_heads: int):
    """[T, K, H] to [T, N, H]: a kv head for each query head of its group."""
    return jnp.repeat(x, num_heads // x.shape[1], axis=1)
