"""Attention to latents on Hopper: packs a call for its kernels, and unpacks their results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import latent8
from pallas_kernels import work as work_list
from pallas_kernels.contract import Call, Kernel, Result, check_options
from pallas_kernels.hopper.common import ROWS, numbers_of
from pallas_kernels.hopper.latent_kernel import attend_segments
from pallas_kernels.hopper.latent_warpgroup import GROUP, LatentConfig
from pallas_kernels.hopper.merge import merge_segments, whole_rows
from pallas_kernels.hopper.schedule import NUM_PROCESSORS
from pallas_kernels.hopper.tiles import Tiles, where_queried
from pallas_kernels.work import Work

# Numbers of a latent: a tile of shared memory for each warpgroup at least; of 576, queries and two pieces take 216 of
# 227 KB.
MIN_HEAD_DIM, MAX_HEAD_DIM = 128, 576
# Codes of a latent in 8 bits. Its four scales are 16 bytes: of fewer bytes TMA reads no rows.
NUM_CODES = 4 * GROUP


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the kernel runs.

    num_workers: stretches that the work is cut for; by default, with their parts, one block of threads for each
      multiprocessor.
    interpret: as in `schedule.Tuning`.
    """

    num_workers: int | None = None
    interpret: Any = False


def _tiles(call: Call) -> tuple[Tiles, int]:
    """Returns a call's tiles, and the number of parts of 64 query heads that each is in."""
    pool, heads = call.pool.kv, call.q.shape[2]
    if pool.shape[2:4] != (1, 1):
        raise NotImplementedError(f"{pool.shape[3]} kv heads of keys and values; this kernel takes one, of latents")
    if call.pool.rotated is not None:
        _check_codes(call)
    elif pool.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"latents in {pool.dtype}; this kernel takes bfloat16, float16, int8 in groups")
    elif (h := pool.shape[5]) % ROWS or not MIN_HEAD_DIM <= h <= MAX_HEAD_DIM:
        multiples = f"multiples of {ROWS} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        raise NotImplementedError(f"latents of {h} numbers; this kernel takes {multiples}")
    if heads > ROWS and heads != 2 * ROWS:
        raise NotImplementedError(f"{heads} query heads; with latents this kernel takes up to {ROWS}, or {2 * ROWS}")
    parts = 1 if heads <= ROWS else 2
    return Tiles.of(call, parts=parts), parts


def _check_codes(call: Call) -> None:
    """Raises NotImplementedError if the kernel does not read a pool's codes and rotated numbers."""
    call.pool.check_scales()
    (kv, scales, *_, rotated), q = call.pool, call.q.dtype
    assert scales is not None and rotated is not None
    found = kv.dtype, kv.shape[5], scales.shape[5] * GROUP, rotated.dtype, rotated.shape[5]
    if found != (jnp.int8, NUM_CODES, NUM_CODES, jnp.bfloat16, ROWS):
        raise NotImplementedError(
            f"latents of {kv.shape[5]} codes in {kv.dtype} with {scales.shape[5]} scales and {rotated.shape[5]} "
            f"rotated numbers in {rotated.dtype}; this kernel takes {NUM_CODES} in int8 with a scale for each {GROUP}, "
            f"and {ROWS} in bfloat16"
        )
    if q != jnp.bfloat16:
        raise NotImplementedError(f"queries in {q}; with latents in 8 bits this kernel takes bfloat16")


def schedule(call: Call, *, tuning: Tuning) -> Work:
    """The work list of calls that share rows and pattern, as the layers of a model do. It reads only q's shape."""
    (tiles, parts), shape = _tiles(call), call.pool.kv.shape
    return work_list.schedule(
        *tiles.split(call),
        call.effective_pattern,
        block_size=shape[4],
        num_kv_heads=1,
        per_block_id=work_list.units_per_block_id(shape),
        num_workers=tuning.num_workers or NUM_PROCESSORS // parts,
    )


# A separate jit, so that all layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames="tuning")
def attend(call: Call, work: Work | None = None, *, tuning: Tuning) -> Result:
    """Attends a call to a pool of latents; `pallas_kernels.contract` has the arguments.

    Args:
      work: from `schedule`; None makes it here.

    Raises:
      NotImplementedError: a dtype, latent, block size, number of heads or option that the kernel does not support.
    """
    pool = call.pool.kv
    check_options(call, "return_lse", "out_dtype", "latents", "scales", "rotated")
    tiles, parts = _tiles(call)
    codes = call.pool.rotated is not None
    if codes:
        call = call.replace(q=latent8.rotated_first(call.q, ROWS))
    if work is None:
        work = schedule(call, tuning=tuning)
    config = LatentConfig(
        num_kv_heads=1,
        head_dim=call.q.shape[3],
        block_size=pool.shape[4],
        rows=tiles.rows,
        dtype=call.q.dtype if codes else pool.dtype,
        num_workers=work.num_workers(1),
        stages=2,
        codes=pool.dtype if codes else None,
        parts=parts,
    )
    num_rows = whole_rows(tiles.queries * tiles.group, config.head_dim)
    partial, partial_lse, out, lse = attend_segments(
        tiles.pack_queries(call.q.astype(config.dtype), padded=bool(tuning.interpret)),
        tiles.pack_positions(call.positions)[:, 0],
        call.pool,
        work,
        numbers_of(call),
        config,
        jax.ShapeDtypeStruct((len(work.units) * parts, num_rows, config.head_dim), call.out_dtype),
        tuning.interpret,
    )
    # A tile's parts are merged as rows of one matrix.
    partial, partial_lse, out, lse = (
        x.reshape(len(x) // parts, -1, *x.shape[2:]) for x in (partial, partial_lse, out, lse)
    )
    out, lse = merge_segments(partial, partial_lse, work, None, out, lse, tuning.interpret)
    out, lse = (tiles.unpack(x.reshape(len(x) * parts, -1, *x.shape[2:])) for x in (out, lse))
    if tiles.width > 1:  # a tile without any query has no segment, and so no result either
        out, lse = where_queried(call, out, 0), where_queried(call, lse, -jnp.inf)
    if codes:
        out = latent8.in_halves(out, ROWS)
    return Result(out, lse if call.options.return_lse else None)


KERNEL = Kernel(attend, Tuning(), schedule)
