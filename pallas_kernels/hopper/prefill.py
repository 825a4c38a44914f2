"""Attention of many queries to a row, on Hopper: a call cut and packed for its kernel, and its result unpacked."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.contract import Call, Kernel, Pool, Result, check_options
from pallas_kernels.hopper import prefill_work
from pallas_kernels.hopper import quantised as narrow
from pallas_kernels.hopper.common import ROWS, check_heads, launch, layout, numbers_of
from pallas_kernels.hopper.decode import PRODUCTS
from pallas_kernels.hopper.prefill_kernel import attend_tile
from pallas_kernels.hopper.prefill_warpgroup import CONSUMERS, Config
from pallas_kernels.hopper.prefill_work import TILE, PrefillWork, piece_tokens, splits_of
from pallas_kernels.hopper.tiles import Tiles, where_queried
from pallas_kernels.work import TILE_KV, unit_tokens, units_per_block_id


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the kernel runs.

    stages: pieces of keys and values held at once.
    splits: of each tile over its keys; None: as many as keep the chip busy.
    take_turns: one consumer has the tensor cores while the other computes its softmax.
    registers: weights stay in registers: a tenth fewer instructions than through shared memory, counted in the inner
      loop. Compiled kernels sum the output in place. jax's interpreter can do neither and does without;
      `tests.emulator` tests both forms against the reference. Codes leave no shared memory for weights.
    interpret: True runs the kernel on the CPU, in jax's interpreter of GPU programs; or that interpreter's parameters.
    """

    stages: int = 2
    splits: int | None = None
    take_turns: bool = True
    registers: bool = True
    interpret: Any = False


def schedule(call: Call, *, tuning: Tuning) -> PrefillWork:
    """The work of calls that share rows and pattern, as the layers of a model do. It reads only q's shape."""
    shape = call.pool.kv.shape
    return prefill_work.schedule(
        *Tiles.of(call, CONSUMERS).split(call),
        call.effective_pattern,
        block_size=shape[4],
        head_dim=shape[5],
        per_block_id=units_per_block_id(shape),
        splits=_splits(call, tuning),
    )


def _splits(call: Call, tuning: Tuning) -> int:
    if tuning.splits is not None:
        return tuning.splits
    tiles, (block_size, head_dim) = Tiles.of(call, CONSUMERS), call.pool.kv.shape[4:]
    num_tiles, width = tiles.num_rows * tiles.count, call.tables.shape[1]
    return splits_of(num_tiles, tiles.num_kv_heads, width, block_size=block_size, head_dim=head_dim)


# A separate jit, so that all layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames="tuning")
def attend(call: Call, work: PrefillWork | None = None, *, tuning: Tuning) -> Result:
    """Attends a call; `pallas_kernels.contract` has the arguments.

    Args:
      work: from `schedule`; None makes it here.

    Raises:
      NotImplementedError: a dtype, head dim, block size, group or option that the kernel does not support.
    """
    options, pool = call.options, call.pool.kv
    check_options(call, "q_sink", "sinks", "soft_cap", "return_lse", "out_dtype", "scales")
    check_heads(call, PRODUCTS)
    call.pool.check_scales()
    if pool.dtype.itemsize == 1 and pool.shape[5] > 128:
        raise NotImplementedError("codes with a head dim of 256: they and the output do not fit the registers")
    tiles = Tiles.of(call, CONSUMERS)
    if work is None:
        work = schedule(call, tuning=tuning)
    splits = _splits(call, tuning)
    compiled, block_size, h = not tuning.interpret, *pool.shape[4:]
    dtype = jnp.dtype(PRODUCTS[pool.dtype])
    config = Config(
        num_kv_heads=tiles.num_kv_heads,
        head_dim=h,
        block_size=block_size,
        dtype=dtype,
        # Results of splits are rounded once they are merged.
        out_dtype=call.out_dtype if splits == 1 else jnp.dtype(jnp.float32),
        stages=tuning.stages,
        soft_cap=options.soft_cap,
        take_turns=tuning.take_turns,
        registers=tuning.registers and compiled,
        in_place=compiled,
        num_sink_queries=call.num_sink_queries,
        splits=splits,
        codes=pool.dtype if pool.dtype.itemsize == 1 else None,
    )
    out, lse = _attend_tiles(
        tiles.pack(call.q.astype(dtype)),
        tiles.pack_sink_queries(options.q_sink, dtype),
        tiles.pack_positions(call.positions),
        call.pool,
        tiles.pack_sinks(options.sinks),
        work,
        numbers_of(call),
        config,
        tuning.interpret,
    )
    if splits > 1:
        out, lse = _merged(out, lse, splits)
    lse = where_queried(call, tiles.unpack(lse), -jnp.inf) if options.return_lse else None
    return Result(where_queried(call, tiles.unpack(out.astype(call.out_dtype)), 0), lse)


def _merged(out, lse, splits: int):
    """Results [M, 64, H] and log-sum-exp [M, 64] of all keys, from those [M * splits, ...] of the splits."""
    out, lse = (x.reshape(-1, splits, *x.shape[1:]) for x in (out, lse))
    top = jnp.max(lse, axis=1, keepdims=True)
    weights = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = weights.sum(axis=1)
    out = (out * weights[..., None]).sum(axis=1) / jnp.where(total == 0, 1.0, total)[..., None]
    return out, jnp.where(total == 0, -jnp.inf, top[:, 0] + jnp.log(total))


def _attend_tiles(q, q_sink, positions, pool: Pool, sinks, work: PrefillWork, numbers, config: Config, interpret):
    """Output [S*K*2*splits, 64, H] in out_dtype and natural log-sum-exp [S*K*2*splits, 64] float32, in order of tiles.

    Args:
      q: [S*K*2, 64, H] of S tiles of 2 x 64 rows; q_sink: [S*K*2, J, 64, H] or None. positions: [S, 2, 64] of the rows.
      sinks: [K, 64] learned sink logits in base 2 of the rows of each kv head; None without.
      numbers: from `numbers_of`.
    """
    size, h, piece = unit_tokens(config.block_size), config.head_dim, piece_tokens(config.head_dim)
    tiles, part_tiles = layout(h, 2), layout(math.gcd(h, config.part), 2)  # wgmma reads whole tiles
    buffers = functools.partial(plgpu.SMEM, (config.stages, piece, h), config.dtype)
    units, codes = pool.kv.reshape(-1, size, h), config.codes
    scales = None if pool.scales is None else pool.scales.reshape(len(units), *narrow.scales_shape(units))
    arrivals = piece // size
    arrived = plgpu.Barrier(num_arrivals=1 if codes else arrivals, num_barriers=config.stages)
    read = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages)
    weights = plgpu.SMEM((CONSUMERS, ROWS, piece), config.dtype, transforms=part_tiles)
    kernel = launch(
        "hopper_prefill",
        functools.partial(attend_tile, config=config),
        (len(work.tiles) * config.num_kv_heads,),
        out_type=(
            jax.ShapeDtypeStruct((len(q) * config.splits, *q.shape[1:]), config.out_dtype),
            jax.ShapeDtypeStruct((len(q) * config.splits, q.shape[1]), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((CONSUMERS, ROWS, h), config.dtype, transforms=tiles),
            buffers(transforms=tiles),
            buffers(transforms=part_tiles),
            *_scratch_of_codes(config, scales),
            None if config.registers else weights,
            plgpu.SMEM(
                (CONSUMERS, ROWS, config.staged),
                config.out_dtype,
                transforms=layout(config.staged, config.out_dtype.itemsize),
            ),
            plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=CONSUMERS),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=2) if codes else None,
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=2) if codes else None,
            arrived,
            arrived,
            read,
            read,
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        interpret=interpret,
        warpgroups=CONSUMERS + 1,
    )
    positions = positions[work.tiles[:, TILE]]
    return kernel(q, q_sink, units, scales, work.units, work.starts, work.tiles, positions, sinks, numbers)


def _scratch_of_codes(config: Config, scales):
    """Shared memory of a quantised pool, in the order of `Refs`: codes, raw scales, scales, their largest."""
    codes, f32, kept = config.codes, jnp.float32, config.stages + 1
    if codes is None:
        return (None,) * 4
    tiles = layout(config.head_dim, 0.5 if codes == jnp.int4 else 1)
    raw = narrow.held(scales.shape[1:])
    pieces = config.piece // TILE_KV
    return (
        plgpu.SMEM((2, config.piece, config.head_dim), codes, transforms=tiles),
        plgpu.SMEM((2, raw[0] * pieces) if config.by_token else (2, pieces, *raw), scales.dtype),
        plgpu.SMEM((kept, 2, config.piece), f32) if config.by_token else None,
        plgpu.SMEM((kept, ROWS), f32) if config.in_units else None,
    )


KERNEL = Kernel(attend, Tuning(), schedule)
