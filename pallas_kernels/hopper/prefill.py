"""Prefill attention for Hopper: arrays of the contract cut and packed for the kernel, and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper.common import ROWS, call, check_heads, int32, layout, sinks_of_rows
from pallas_kernels.hopper.prefill_kernel import CONSUMERS, Config, attend
from pallas_kernels.hopper.prefill_work import TILE, Plan, piece_tokens, plan
from pallas_kernels.patterns import FULL, Pattern
from pallas_kernels.work import split_tiles, unit_tokens


def plan_work(tables, starts, positions, pool, pattern: Pattern, *, num_query_heads: int) -> Plan:
    """What `ragged_paged_attention` makes for itself; give it to layers that share a pattern.

    Args:
      tables, starts, positions, pool, pattern: as of `ragged_paged_attention`.
    """
    _, num_layers, _, kv_heads, block_size, head_dim = pool.shape
    tables, starts, positions = split_tiles(
        tables, starts, positions, CONSUMERS * (ROWS // (num_query_heads // kv_heads))
    )
    return plan(
        tables, starts, positions, pattern, block_size=block_size, head_dim=head_dim,
        units_per_block_id=num_layers * 2 * kv_heads * (block_size // unit_tokens(block_size)),
    )  # fmt: skip


# Under jit of its own, so that all layers of a model share one lowering.
@functools.partial(
    jax.jit,
    static_argnames=("soft_cap", "return_lse", "out_dtype", "stages", "take_turns", "registers", "interpret"),
)
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
    work: Plan | None = None,
    stages: int = 2,
    take_turns: bool = True,
    registers: bool = True,
    interpret: Any = False,
):
    """Attends tiles of many queries to the paged keys and values of their rows; see `pallas_kernels` for the contract.

    Args:
      work: from `plan_work`; None makes it here.
      stages: pieces of keys and values held at once.
      take_turns: one consumer has the tensor cores while the other computes its softmax.
      registers: weights stay in registers and the output is summed in place: 4 to 25 % fewer instructions than through
        shared memory, counted in the emulator of PTX. With a head dim of 256 a compiled kernel sums in place in any
        case: separate sums would not fit the registers. jax's interpreter can do neither and does without;
        `pallas_kernels.ptx` holds both forms to the reference.
      interpret: True runs the kernel on the CPU, in jax's interpreter of GPU programs; or that one's parameters.

    Raises:
      NotImplementedError: a dtype, head dim, block size or group that the kernel lacks.
    """
    s, width, n, h = q.shape
    kv_heads, block_size = pool.shape[3:5]
    group = n // kv_heads
    check_heads(q, pool, (jnp.bfloat16, jnp.float16))
    if q_sink is None:
        pattern = pattern._replace(sink_moved=0)
    if work is None:
        work = plan_work(tables, starts, positions, pool, pattern, num_query_heads=n)
    per_half = ROWS // group
    _, _, split = split_tiles(tables, starts, positions, CONSUMERS * per_half)
    split = jnp.pad(split, ((0, 0), (0, CONSUMERS * per_half - split.shape[1])), constant_values=-1)
    tiles, rows = split.shape[0] // s, per_half * group
    compiled = not interpret
    config = Config(
        kv_heads, h, block_size, pool.dtype, jnp.dtype(out_dtype or q.dtype), stages, soft_cap, take_turns,
        registers and compiled, (registers or h > 128) and compiled, 0 if q_sink is None else q_sink.shape[2],
    )  # fmt: skip

    def packed(x):  # [S, Q, J, N, H] -> [S * tiles * K * 2, J, 64, H]
        x = jnp.pad(x.astype(pool.dtype), ((0, 0), (0, tiles * CONSUMERS * per_half - width), *((0, 0),) * 3))
        x = x.reshape(s * tiles, CONSUMERS, per_half, -1, kv_heads, group, h)
        x = x.transpose(0, 4, 1, 3, 2, 5, 6).reshape(-1, x.shape[3], rows, h)
        return jnp.pad(x, ((0, 0), (0, 0), (0, ROWS - rows), (0, 0)))

    row_positions = jnp.repeat(split, group, axis=1).reshape(-1, CONSUMERS, rows)
    row_positions = jnp.pad(row_positions, ((0, 0), (0, 0), (0, ROWS - rows)), constant_values=-1)
    sinks = sinks_of_rows(sink_logits, kv_heads, group, per_half)
    second = None if q_sink is None else packed(q_sink)
    q = packed(q[:, :, None])[:, 0]
    out, lse = _attend(q, second, row_positions, pool, sinks, work, pattern, layer, config, interpret)

    def unpacked(x):  # [S * tiles * K * 2, 64, ...] -> [S, Q, N, ...]
        x = x[:, :rows].reshape(s * tiles, kv_heads, CONSUMERS, per_half, group, *x.shape[2:])
        return jnp.moveaxis(x, 1, 3).reshape(s, -1, n, *x.shape[5:])[:, :width]

    out = jnp.where(positions[:, :, None, None] >= 0, unpacked(out), 0)
    if not return_lse:
        return out
    return out, jnp.where(positions[:, :, None] >= 0, unpacked(lse), -jnp.inf)


def _attend(q, q_sink, positions, pool, sinks, work: Plan, pattern: Pattern, layer, config: Config, interpret):
    """Output [S*K*2, 64, H] in out_dtype and natural log-sum-exp [S*K*2, 64] float32 of S tiles of 2 x 64 rows.

    Args:
      q: [S*K*2, 64, H]; q_sink: [S*K*2, J, 64, H] or None. positions: [S, 2, 64] of the rows.
      sinks: [K, 64] learned sink logits in base 2 of the rows of each kv head; -inf where there are none.
    """
    size, h, piece = unit_tokens(config.block_size), config.head_dim, piece_tokens(config.head_dim)
    numbers = jnp.stack([int32(x) for x in (*pattern, layer)])
    tiles, part_tiles = layout(h, 2), layout(math.gcd(h, config.part), 2)  # wgmma reads whole tiles
    buffers = functools.partial(plgpu.SMEM, (config.stages, piece, h), config.dtype)
    arrived = plgpu.Barrier(num_arrivals=piece // size, num_barriers=config.stages)
    read = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages)
    weights = plgpu.SMEM((CONSUMERS, ROWS, piece), config.dtype, transforms=part_tiles)
    kernel = call(
        "hopper_prefill",
        functools.partial(attend, config=config),
        (len(work.tiles) * config.num_kv_heads,),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, config.out_dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((CONSUMERS, ROWS, h), config.dtype, transforms=tiles),
            buffers(transforms=tiles),
            buffers(transforms=part_tiles),
            None if config.registers else weights,
            plgpu.SMEM(
                (CONSUMERS, ROWS, config.staged), config.out_dtype,
                transforms=layout(config.staged, config.out_dtype.itemsize),
            ),
            plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=CONSUMERS),
            arrived,
            arrived,
            read,
            read,
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        interpret=interpret,
        warpgroups=CONSUMERS + 1,
    )  # fmt: skip
    positions = positions[work.tiles[:, TILE]]
    return kernel(q, q_sink, pool.reshape(-1, size, h), work.units, work.starts, work.tiles, positions, sinks, numbers)
