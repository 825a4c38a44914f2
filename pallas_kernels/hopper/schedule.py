"""The work list of decode and of the mass on Hopper, and the plan of both: the only place that decides it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import work
from pallas_kernels.contract import Call
from pallas_kernels.hopper.common import ROWS
from pallas_kernels.hopper.tiles import Tiles

NUM_PROCESSORS = 132  # of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a kernel runs.

    num_workers: blocks of threads that the work is cut for; by default as many as run at once, see `Plan.of`.
    stages: pieces of 64 keys and values that each of them holds at once. Default: for decode see `Plan.of`; for the
      mass 64 KB of keys.
    swapped: True if decode takes keys as rows of its products, queries as columns; by default wherever it can.
    interpret: True runs the kernel on the CPU, in jax's interpreter of GPU programs; or that interpreter's parameters.
    """

    num_workers: int | None = None
    stages: int | None = None
    swapped: bool | None = None
    interpret: Any = False


# Queries x query heads of a group that swapped operands are for: beyond, registers are short.
MAX_COLUMNS = 16


class Plan(NamedTuple):
    """Plan of a decode call.

    swapped: keys are rows of the products, see `decode_swapped`. blocks: of threads that a multiprocessor holds.
    stages: as in `Tuning`.
    """

    swapped: bool
    blocks: int
    stages: int

    @classmethod
    def of(cls, head_dim: int, pool_dtype, rows: int, swapped: bool | None = None) -> Plan:
        """Returns the plan for matrices of `rows` rows, padding included.

        Raises:
          NotImplementedError: swapped operands are requested but not supported.
        """
        can = rows <= MAX_COLUMNS and head_dim % ROWS == 0
        if swapped and not can:
            raise NotImplementedError(
                f"swapped operands with {rows} queries x query heads and a head dim of {head_dim}; "
                f"they take up to {MAX_COLUMNS}, and multiples of {ROWS}"
            )
        bits = 4 if pool_dtype == jnp.int4 else 8 * jnp.dtype(pool_dtype).itemsize
        wide = head_dim > 128
        if not (can if swapped is None else swapped):
            return cls(False, 1 if wide else 2, 2 if bits == 16 else 3)
        # Memory is the limit of 16 bits, which needs no more blocks; codes gain by each that registers and shared
        # memory leave room for. With more rows that is one less, but for int8, which needs the fewest registers.
        blocks = {16: 1 if wide else 2, 8: 2 if wide else 3, 4: 2 if wide else 4}[bits]
        fewer = bits < 16 and rows > 8 and (wide or pool_dtype != jnp.int8)
        return cls(True, blocks - fewer, 2)


def plan(call: Call, tuning: Tuning) -> Plan:
    """Plans a decode call."""
    shape, dtype = call.pool.kv.shape, call.pool.kv.dtype
    return Plan.of(shape[5], dtype, Tiles.of(call).rows, tuning.swapped)


def schedule(call: Call, *, tuning: Tuning) -> work.Work:
    """The work list of calls that share rows and pattern, as the layers of a model do. It reads only q's shape."""
    shape = call.pool.kv.shape
    return work.schedule(
        *Tiles.of(call).split(call),
        call.effective_pattern,
        block_size=shape[4],
        num_kv_heads=shape[3],
        per_block_id=work.units_per_block_id(shape),
        num_workers=tuning.num_workers or NUM_PROCESSORS * plan(call, tuning).blocks,
    )
