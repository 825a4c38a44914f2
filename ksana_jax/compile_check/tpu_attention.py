"""jax's own TPU kernel behind the contract of `pallas_kernels`' ragged paged attention. Not chosen by the engine.

The kernel reads pages [B, 2K, H], each token's keys and values in turn; the pool holds [2, K, B, H]. So the visible
blocks of one layer are gathered into that order before every call: read, written, and read again by the kernel, where
one reading would do. A pool that rested as [M, L, B, 2K, H] would go in as it is: that is `attend_pages`. Besides, the
kernel knows causal masks and a window that is fixed when it is compiled and counted in slots of the table, which is
wrong where blocks are evicted; the engine's patterns are data, so that changing one does not compile anew.
`ksana_jax.compile_check.tpu` compiles both ways and says how much memory each takes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from pallas_kernels.patterns import FULL, Pattern

# Tokens of text and queries that the kernel looks at together. What jax takes untuned, 128 pages, would be 64 MiB of
# buffers with blocks of 64 and 8 kv heads; these are 4 MiB. Not tuned, for lack of a TPU.
TOKENS_AT_ONCE, QUERIES_AT_ONCE = 512, 32


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
    return_lse: bool = False,
    out_dtype=None,
    tokens_at_once: int = TOKENS_AT_ONCE,
    queries_at_once: int = QUERIES_AT_ONCE,
) -> jax.Array:
    """Attends the queries of each tile to the slots of its block table; see `pallas_kernels.reference` for arguments.

    Queries of a tile are at consecutive positions, in slots that its table has, padding last: as the engine makes them.

    Raises:
      NotImplementedError: anything but full attention in bfloat16 that gives only its result; a head dim that is not
        128; a number of kv heads that does not fill the kernel's tiles.
    """
    _refuse(q, pool, pattern, q_sink, sink_logits, return_lse, out_dtype)
    num_blocks, num_layers, _, kv_heads, block_size, head_dim = pool.shape
    blocks = pool.reshape(num_blocks * num_layers, 2, kv_heads, block_size, head_dim)
    pages = blocks[tables * num_layers + layer].transpose(0, 1, 4, 3, 2, 5)
    pages = pages.reshape(tables.size, block_size, 2 * kv_heads, head_dim)
    page_ids = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    return attend_pages(
        q, pages, page_ids, starts, positions, soft_cap=soft_cap, tokens_at_once=tokens_at_once,
        queries_at_once=queries_at_once,
    )  # fmt: skip


def attend_pages(
    q: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    *,
    soft_cap: float | None = None,
    tokens_at_once: int = TOKENS_AT_ONCE,
    queries_at_once: int = QUERIES_AT_ONCE,
) -> jax.Array:
    """The same over pages in the kernel's order, without a copy of any.

    Args:
      q: [S, Q, N, H].
      pages: [number, B, 2K, H], keys and values of each kv head in turn. A pool [M, L, B, 2K, H] is one of M*L pages.
      page_ids: [S, P] int32; of such a pool, block * L + layer.
      starts, positions: [S, P] and [S, Q], as in the contract.

    Returns:
      [S, Q, N, H] in q's dtype, zeros for padding.
    """
    tiles, size, heads, head_dim = q.shape
    block_size = pages.shape[1]
    lengths = jnp.clip(positions.max(axis=1, keepdims=True) + 1 - starts, 0, block_size).sum(axis=1)
    valid = positions >= 0
    counts = valid.sum(axis=1)
    # The kernel knows neither padding nor empty rows: tokens and tiles that are there come first.
    present = jnp.argsort(counts == 0, stable=True)
    packed = jnp.argsort(~valid.reshape(-1), stable=True)
    ends = jnp.cumsum(counts[present])
    out = kernel.ragged_paged_attention(
        q.reshape(-1, heads, head_dim)[packed],
        pages,
        lengths[present].astype(jnp.int32),
        page_ids[present],
        jnp.pad(ends, (1, 0)).astype(jnp.int32),
        (counts > 0).sum(dtype=jnp.int32)[None],
        soft_cap=soft_cap,
        num_kv_pages_per_block=max(min(tokens_at_once // block_size, page_ids.shape[1]), 1),
        num_queries_per_block=min(queries_at_once, tiles * size),
    )
    out = jnp.zeros_like(out).at[packed].set(out).reshape(q.shape)
    return jnp.where(valid[..., None, None], out, 0)


def _refuse(q, pool, pattern: Pattern, q_sink, sink_logits, return_lse: bool, out_dtype) -> None:
    """Raises NotImplementedError for what the kernel does not have."""
    if not all(isinstance(x, int) for x in pattern) or pattern != FULL:
        raise NotImplementedError(f"jax's TPU kernel is used for full attention only, known when compiled: {pattern}")
    if q_sink is not None or sink_logits is not None or return_lse:
        raise NotImplementedError("jax's TPU kernel has no second query, no learned sinks and no log-sum-exp")
    if not q.dtype == pool.dtype == (out_dtype or q.dtype) == jnp.bfloat16:
        types = f"{pool.dtype} for {q.dtype} to {jnp.dtype(out_dtype or q.dtype)}"
        raise NotImplementedError(f"jax's TPU kernel is used with bfloat16 throughout, not {types}")
    kv_heads, head_dim = pool.shape[3], pool.shape[5]
    if head_dim != 128:
        raise NotImplementedError(f"jax's TPU kernel compiles for head dim 128, not {head_dim}")
    if kv_heads % 8 and kv_heads not in (1, 2, 4):
        raise NotImplementedError(f"jax's TPU kernel has 1, 2, 4 or a multiple of 8 kv heads, not {kv_heads}")
