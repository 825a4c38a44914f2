"""Prefill attention for Hopper: arrays of the contract cut and packed for the kernel, and back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.hopper_common import LOG2E, ROWS
from pallas_kernels.hopper_prefill_kernel import CONSUMERS, Config, attend
from pallas_kernels.hopper_prefill_plan import Plan, plan
from pallas_kernels.patterns import FULL, Pattern
from pallas_kernels.work import split_tiles


def plan_work(tables, starts, positions, pool, pattern: Pattern, *, num_query_heads: int) -> Plan:
    """What `ragged_paged_attention` makes for itself; give it to layers that share a pattern.

    Args:
      tables, starts, positions, pool, pattern: as of `ragged_paged_attention`.
    """
    _, num_layers, _, kv_heads, block_size, _ = pool.shape
    tables, starts, positions = split_tiles(
        tables, starts, positions, CONSUMERS * (ROWS // (num_query_heads // kv_heads))
    )
    return plan(
        tables, starts, positions, pattern, block_size=block_size, rows_per_block_id=num_layers * 2 * kv_heads
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
    registers: bool | None = None,
    interpret=None,
):
    """Attends tiles of many queries to the paged keys and values of their rows; see `pallas_kernels` for the contract.

    Args:
      work: from `plan_work`; None makes it here.
      stages: pieces of keys and values held at once.
      take_turns: one consumer has the tensor cores while the other computes its softmax.
      registers: weights stay in registers; by default wherever the kernel is compiled.
      interpret: `plgpu.InterpretGPUParams` runs the kernel on the CPU.

    Raises:
      NotImplementedError: a second query, or a dtype, head dim, block size or group that the kernel lacks.
    """
    s, width, n, h = q.shape
    kv_heads, block_size = pool.shape[3:5]
    group = n // kv_heads
    if q_sink is not None:
        raise NotImplementedError("second queries; the kernel for few queries to a row takes them")
    if pool.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"keys and values in {pool.dtype}; this kernel takes bfloat16 and float16")
    if h not in (64, 96, 128):
        raise NotImplementedError(f"a head dim of {h}; this kernel takes 64, 96 and 128")
    if group > ROWS:
        raise NotImplementedError(f"{group} query heads to a kv head; this kernel takes up to {ROWS}")
    pattern = pattern._replace(sink_moved=0)
    if work is None:
        work = plan_work(tables, starts, positions, pool, pattern, num_query_heads=n)
    _, _, split = split_tiles(tables, starts, positions, CONSUMERS * (ROWS // group))
    per_half = ROWS // group
    tiles, rows = split.shape[0] // s, per_half * group
    config = Config(
        kv_heads, h, block_size, pool.dtype, jnp.dtype(out_dtype or q.dtype), stages, soft_cap, take_turns,
        interpret is None if registers is None else registers,
    )  # fmt: skip

    q = jnp.pad(q.astype(pool.dtype), ((0, 0), (0, tiles * CONSUMERS * per_half - width), (0, 0), (0, 0)))
    q = q.reshape(s * tiles, CONSUMERS, per_half, kv_heads, group, h)
    q = jnp.moveaxis(q, 3, 1).reshape(-1, rows, h)  # [S * tiles * K * 2, rows, H]
    q = jnp.pad(q, ((0, 0), (0, ROWS - rows), (0, 0)))
    row_positions = jnp.repeat(split, group, axis=1).reshape(-1, CONSUMERS, rows)
    row_positions = jnp.pad(row_positions, ((0, 0), (0, 0), (0, ROWS - rows)), constant_values=-1)
    sinks = jnp.full((kv_heads, 1, group), -jnp.inf, jnp.float32)
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(kv_heads, 1, group) * LOG2E
    sinks = jnp.broadcast_to(sinks, (kv_heads, per_half, group)).reshape(kv_heads, rows)
    sinks = jnp.pad(sinks, ((0, 0), (0, ROWS - rows)))
    out, lse = attend(q, row_positions, pool, sinks, work, pattern, layer, config, interpret)

    def unpacked(x):  # [S * tiles * K * 2, 64, ...] -> [S, Q, N, ...]
        x = x[:, :rows].reshape(s * tiles, kv_heads, CONSUMERS, per_half, group, *x.shape[2:])
        return jnp.moveaxis(x, 1, 3).reshape(s, -1, n, *x.shape[5:])[:, :width]

    out = jnp.where(positions[:, :, None, None] >= 0, unpacked(out), 0)
    if not return_lse:
        return out
    return out, jnp.where(positions[:, :, None] >= 0, unpacked(lse), -jnp.inf)
