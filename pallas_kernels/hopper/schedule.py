"""The work list of decode and of the mass on Hopper, and how the two are run."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels import work
from pallas_kernels.contract import Call
from pallas_kernels.hopper.tiles import Tiles

NUM_PROCESSORS = 132  # of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a kernel runs.

    num_workers: blocks of threads that the work is cut for; by default as many as run at once: two for each
      multiprocessor, with a head dim of 256 one.
    stages: pieces of 64 keys and values that each of them holds at once. By default of decode 2, or 3 of 8 or 4 bits;
      of the mass 64 KB of keys.
    interpret: True runs the kernel on the CPU, in jax's interpreter of GPU programs; or that one's parameters.
    """

    num_workers: int | None = None
    stages: int | None = None
    swapped: bool = False
    interpret: Any = False


def schedule(call: Call, *, tuning: Tuning) -> work.Work:
    """The work list of calls that share rows and pattern, as the layers of a model do. Of q it reads the shape."""
    shape = call.pool.kv.shape
    return work.schedule(
        *Tiles.of(call).split(call),
        call.effective_pattern,
        block_size=shape[4],
        num_kv_heads=shape[3],
        per_block_id=work.units_per_block_id(shape),
        num_workers=tuning.num_workers or NUM_PROCESSORS * (1 if shape[5] > 128 else 2),
    )
