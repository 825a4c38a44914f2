"""Ragged paged attention for Hopper: arrays of the contract cut and packed for the kernels, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import int4
from pallas_kernels.hopper.common import ROWS, Config, check_heads, sinks_of_rows
from pallas_kernels.hopper.decode_kernel import attend
from pallas_kernels.hopper.merge import merge
from pallas_kernels.patterns import FULL, Pattern
from pallas_kernels.work import Work, plan, split_tiles, unit_tokens

# Of a pool's dtype, the one in which it is multiplied: it holds the pool's numbers exactly.
PRODUCTS = {
    jnp.dtype(pool): product
    for pool, product in (
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.float16),
        (jnp.int4, jnp.bfloat16),
        (jnp.int8, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float16),
    )
}
NUM_PROCESSORS = 132  # of an H100 or H200


def plan_work(
    tables, starts, positions, pool, pattern: Pattern, *, num_query_heads: int, num_workers: int | None = None
) -> Work:
    """The work list that `ragged_paged_attention` makes for itself; give it to layers that share a pattern.

    Args:
      tables, starts, positions, pool, pattern, num_workers: as of `ragged_paged_attention`.
    """
    _, num_layers, _, kv_heads, block_size, h = pool.shape
    num_workers = num_workers or NUM_PROCESSORS * (1 if h > 128 else 2)
    tables, starts, positions = split_tiles(tables, starts, positions, ROWS // (num_query_heads // kv_heads))
    return plan(
        tables, starts, positions, pattern, block_size=block_size, num_kv_heads=kv_heads,
        units_per_block_id=num_layers * 2 * kv_heads * (block_size // unit_tokens(block_size)), num_workers=num_workers,
    )  # fmt: skip


# Under jit of its own, so that all layers of a model share one lowering.
@functools.partial(
    jax.jit,
    static_argnames=("soft_cap", "return_lse", "out_dtype", "num_workers", "stages", "interpret"),
)
def ragged_paged_attention(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    *,
    layer,
    pattern: Pattern = FULL,
    q_sink: jax.Array | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    scales: jax.Array | None = None,
    return_lse: bool = False,
    out_dtype=None,
    work: Work | None = None,
    num_workers: int | None = None,
    stages: int | None = None,
    interpret: Any = False,
):
    """Attends tiles of queries to the paged keys and values of their rows; see `pallas_kernels` for the contract.

    Args:
      work: from `plan_work`; None makes it here.
      num_workers: blocks of threads that the work is cut for; by default as many as run at once: two for each
        multiprocessor, with a head dim of 256 one.
      stages: pieces of 64 keys and values that each of them holds at once; 2 by default, or 3 of 8 or 4 bits.
      interpret: True runs the kernel on the CPU, in jax's interpreter of GPU programs; or that one's parameters.

    Raises:
      NotImplementedError: a dtype, head dim, block size or group that the kernel lacks.
    """
    s, width, n, h = q.shape
    kv_heads, block_size = pool.shape[3:5]
    group = n // kv_heads
    check_heads(q, pool, PRODUCTS)
    quantised = pool.dtype.itemsize == 1
    if quantised != (scales is not None):
        raise ValueError(f"a pool of {pool.dtype} {'without' if quantised else 'with'} scales")
    if scales is not None:
        dtype, shape = jnp.dtype("float32"), pool.shape[:-1]
        if pool.dtype == jnp.int4:
            dtype, shape = jnp.dtype("bfloat16"), int4.scales_shape(pool.shape)
        if scales.dtype != dtype or scales.shape != shape:
            raise ValueError(f"scales are {scales.dtype}{list(scales.shape)}, not {dtype}{list(shape)}")
    if q_sink is None:
        pattern = pattern._replace(sink_moved=0)
    if work is None:
        work = plan_work(tables, starts, positions, pool, pattern, num_query_heads=n, num_workers=num_workers)
    _, _, split = split_tiles(tables, starts, positions, ROWS // group)
    per_tile = split.shape[1]
    tiles = split.shape[0] // s
    rows = -(-per_tile * group // 8) * 8
    dtype = jnp.dtype(PRODUCTS[pool.dtype])
    config = Config(
        kv_heads, h, block_size, rows, dtype, work.first.shape[0] - 1, stages or (3 if quantised else 2), soft_cap,
        0 if q_sink is None else q_sink.shape[2], pool.dtype if quantised else None,
    )  # fmt: skip

    def packed(x, *more):  # [S, Q, ..., N, H] -> [S * tiles * K, ..., rows, H]
        x = jnp.pad(x.astype(dtype), ((0, 0), (0, tiles * per_tile - width), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(s * tiles, per_tile, *more, kv_heads, group, h)
        x = jnp.moveaxis(x, (-3, 1), (1, -3)).reshape(s * tiles * kv_heads, *more, per_tile * group, h)
        return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, rows - per_tile * group), (0, 0)))

    row_positions = jnp.repeat(split, group, axis=1)
    row_positions = jnp.pad(row_positions, ((0, 0), (0, ROWS - per_tile * group)), constant_values=-1)
    partial, partial_lse = attend(
        packed(q), None if q_sink is None else packed(q_sink, config.num_sink_queries), row_positions, pool,
        scales, work, pattern, layer, config, interpret,
    )  # fmt: skip
    sinks = sinks_of_rows(sink_logits, kv_heads, group, per_tile)
    out, lse = merge(partial, partial_lse, work, sinks, config, per_tile * group, out_dtype or q.dtype, interpret)

    def unpacked(x, nothing):  # [S * tiles * K, rows, ...] -> [S, Q, N, ...]
        x = x.reshape(s, tiles, kv_heads, per_tile, group, *x.shape[2:])
        x = jnp.moveaxis(x, 2, 3).reshape(s, tiles * per_tile, n, *x.shape[5:])[:, :width]
        if width == 1:  # a tile without a query has no segment
            return x
        return jnp.where(positions.reshape(s, width, *(1,) * (x.ndim - 2)) >= 0, x, nothing)

    out = unpacked(out, 0)
    return (out, unpacked(lse, -jnp.inf)) if return_lse else out
