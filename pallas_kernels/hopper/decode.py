"""Attention with few queries per row on Hopper: packs a call for its kernels, and unpacks their results."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Call, Kernel, Result, check_options
from pallas_kernels.hopper.common import Config, check_heads, numbers_of
from pallas_kernels.hopper.decode_kernel import attend_segments
from pallas_kernels.hopper.mass import probability_mass
from pallas_kernels.hopper.merge import merge_segments, whole_rows
from pallas_kernels.hopper.schedule import Tuning, plan, schedule
from pallas_kernels.hopper.tiles import Tiles, where_queried
from pallas_kernels.work import Work

# For a pool's dtype, the one of its products: it holds the pool's numbers exactly.
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


# A separate jit, so that all layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames="tuning")
def attend(call: Call, work: Work | None = None, *, tuning: Tuning) -> Result:
    """Attends a call; `pallas_kernels.contract` has the arguments.

    Args:
      work: from `schedule`; None makes it here.

    Raises:
      NotImplementedError: a dtype, head dim, block size, group or option that the kernel does not support.
    """
    options, pool = call.options, call.pool.kv
    check_options(
        call, "q_sink", "sinks", "soft_cap", "return_lse", "return_mass", "mass_factor", "out_dtype", "scales"
    )
    check_heads(call, PRODUCTS)
    call.pool.check_scales()
    tiles = Tiles.of(call)
    if work is None:
        work = schedule(call, tuning=tuning)
    how = plan(call, tuning)
    codes = pool.dtype if pool.dtype.itemsize == 1 else None
    dtype = jnp.dtype(PRODUCTS[pool.dtype])
    config = Config(
        num_kv_heads=tiles.num_kv_heads,
        head_dim=pool.shape[5],
        block_size=pool.shape[4],
        rows=tiles.rows,
        dtype=dtype,
        num_workers=work.num_workers(tiles.num_kv_heads),
        stages=tuning.stages or how.stages,
        soft_cap=options.soft_cap,
        num_sink_queries=call.num_sink_queries,
        codes=codes,
        swapped=how.swapped,
    )
    sinks = tiles.pack_sinks(options.sinks)
    num_rows = whole_rows(tiles.queries * tiles.group, config.head_dim)
    positions = tiles.pack_positions(call.positions)[:, 0]
    segments_and_results = attend_segments(
        tiles.pack_queries(call.q.astype(dtype), padded=bool(tuning.interpret)),
        tiles.pack_sink_queries(options.q_sink, dtype),
        positions[:, : config.rows] if config.swapped else positions,
        call.pool,
        work,
        sinks,
        numbers_of(call),
        config,
        jax.ShapeDtypeStruct((len(work.units) * tiles.num_kv_heads, num_rows, config.head_dim), call.out_dtype),
        tuning.interpret,
    )
    partial, partial_lse, out, lse = segments_and_results
    out, lse = merge_segments(partial, partial_lse, work, sinks, out, lse, tuning.interpret)
    out, lse = tiles.unpack(out), tiles.unpack(lse)
    if tiles.width > 1:  # a tile without any query has no segment, and so no result either
        out, lse = where_queried(call, out, 0), where_queried(call, lse, -jnp.inf)
    return Result(
        out,
        lse if options.return_lse else None,
        probability_mass(call, lse, work, tuning=tuning) if options.return_mass else None,
    )


KERNEL = Kernel(attend, Tuning(), schedule)
