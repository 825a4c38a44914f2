"""jax's own TPU kernel behind the contract of `pallas_kernels`. Not chosen by the engine.

The kernel reads pages [B, 2K, H], each token's keys and values alternating; the pool holds [2, K, B, H]. So the visible
blocks of one layer are gathered into that order before every call: read, written, and read again by the kernel, where
one reading would do. A pool stored as [M, L, B, 2K, H] would need no copy: that is `attend_pages`. Moreover, the
kernel knows causal masks and a window that is fixed when it is compiled and counted in slots of the table, which is
wrong where blocks are evicted; the engine's patterns are data, so that changing one compiles nothing.
`ksana_jax.devkit.compile_check.tpu` compiles both ways and reports the memory of each.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from pallas_kernels.contract import Call, Kernel, Result, check_options
from pallas_kernels.patterns import FULL

# Tokens of text and queries that the kernel processes together. jax's untuned default, 128 pages, would be 64 MiB of
# buffers with blocks of 64 and 8 kv heads; these are 4 MiB. Not tuned, for lack of a TPU.
TOKENS_AT_ONCE, QUERIES_AT_ONCE = 512, 32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes of the kernel's pieces: tokens of text and queries that it processes together."""

    tokens_at_once: int = TOKENS_AT_ONCE
    queries_at_once: int = QUERIES_AT_ONCE


def attend(call: Call, work: None = None, *, tuning: Tuning) -> Result:
    """Attends a call; `pallas_kernels.contract` has the arguments.

    Queries of a tile are at consecutive positions, in slots that its table has, padding last: as the engine makes them.

    Raises:
      NotImplementedError: anything but full attention in bfloat16 that gives only its result; a head dim that is not
        128; a number of kv heads that does not fill the kernel's tiles.
    """
    _refuse(call)
    tables = call.tables
    num_blocks, num_layers, _, kv_heads, block_size, head_dim = call.pool.kv.shape
    blocks = call.pool.kv.reshape(num_blocks * num_layers, 2, kv_heads, block_size, head_dim)
    pages = blocks[tables * num_layers + call.layer].transpose(0, 1, 4, 3, 2, 5)
    pages = pages.reshape(tables.size, block_size, 2 * kv_heads, head_dim)
    page_ids = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    out = attend_pages(
        call.q, pages, page_ids, call.starts, call.positions, soft_cap=call.options.soft_cap, tuning=tuning
    )
    return Result(out)


DEFAULT = Tuning()


def attend_pages(
    q: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    *,
    soft_cap: float | None = None,
    tuning: Tuning = DEFAULT,
) -> jax.Array:
    """Attends pages in the kernel's order, without a copy of any.

    Args:
      q: [S, Q, N, H].
      pages: [number, B, 2K, H], keys and values alternating by KV head. A pool [M, L, B, 2K, H] is one of M*L pages.
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
    # The kernel knows neither padding nor empty rows: real tokens and tiles come first.
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
        num_kv_pages_per_block=max(min(tuning.tokens_at_once // block_size, page_ids.shape[1]), 1),
        num_queries_per_block=min(tuning.queries_at_once, tiles * size),
    )
    out = jnp.zeros_like(out).at[packed].set(out).reshape(q.shape)
    return jnp.where(valid[..., None, None], out, 0)


def _refuse(call: Call) -> None:
    """Raises NotImplementedError if the kernel does not support a requirement."""
    check_options(call, "soft_cap", "out_dtype")
    pattern, q, kv = call.pattern, call.q, call.pool.kv
    if not all(isinstance(x, int) for x in pattern) or pattern != FULL:
        raise NotImplementedError(f"jax's TPU kernel is used for full attention only, known when compiled: {pattern}")
    if not q.dtype == kv.dtype == call.out_dtype == jnp.bfloat16:
        types = f"{kv.dtype} for {q.dtype} to {call.out_dtype}"
        raise NotImplementedError(f"jax's TPU kernel is used with bfloat16 throughout, not {types}")
    kv_heads, head_dim = kv.shape[3], kv.shape[5]
    if head_dim != 128:
        raise NotImplementedError(f"jax's TPU kernel compiles for head dim 128, not {head_dim}")
    if kv_heads % 8 and kv_heads not in (1, 2, 4):
        raise NotImplementedError(f"jax's TPU kernel has 1, 2, 4 or a multiple of 8 kv heads, not {kv_heads}")


KERNEL = Kernel(attend, DEFAULT)
