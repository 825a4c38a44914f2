"""Shared parts of the Hopper kernels: configuration, matrices in shared memory, the launch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Call
from pallas_kernels.hopper import interpreter
from pallas_kernels.work import TILE_KV, unit_tokens

ROWS = 64  # of a wgmma
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration for which a kernel is compiled.

    rows: queries x query heads of a group, padded to a multiple of 8, at most 64. num_workers: blocks of threads.
    stages: pieces of keys and values that each of them holds at once. codes: dtype of a quantised pool; dtype is
    the dtype of the factors, 16 bits. swapped: keys are the rows of the products, `rows` their columns. sides: of the
    pool, 2 for keys and values.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    rows: int
    dtype: jnp.dtype
    num_workers: int
    stages: int
    soft_cap: float | None = None
    num_sink_queries: int = 0
    codes: jnp.dtype | None = None
    swapped: bool = False
    sides: int = 2

    @property
    def unit(self) -> int:
        """Tokens of a unit, which one copy reads."""
        return unit_tokens(self.block_size)

    @property
    def units_of_piece(self) -> int:
        return TILE_KV // self.unit

    @property
    def units_of_block(self) -> int:
        return self.block_size // self.unit

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block of threads: as many as have registers for the output."""
        return 2 if self.head_dim > 128 and not self.swapped else 1

    @property
    def width(self) -> int:
        """Columns of the output, and of keys and values in shared memory, of one warpgroup."""
        return self.head_dim // self.warpgroups

    @property
    def scarce_registers(self) -> bool:
        """True if numbers that can be read again are not kept, nor units known ahead: codes of 8 bits at a head dim of
        256 with sink queries would spill."""
        return bool(self.codes) and self.head_dim > 128 and self.num_sink_queries > 0

    @property
    def columns(self) -> int:
        """Columns of the output that are computed together."""
        return 64 if self.head_dim % 64 == 0 else 32

    @property
    def staged(self) -> int:
        """Columns of a float32 partial result that wait in shared memory at once; a final result's take as many
        bytes. With a sink query only 16 of each leave room for two blocks of threads on a multiprocessor: 113 KB each
        at a head dim of 128; 8 if there is a tile for widening."""
        return (8 if self.codes else 16) if self.num_sink_queries else self.columns // 2


def layout(width: int, num_bytes: int | float):
    """Layout in shared memory of matrices [..., width], as wgmma and TMA require, free of bank conflicts.

    Args:
      num_bytes: of a number; 0.5 for 4 bits.
    """
    swizzle = next(x for x in (128, 64, 32) if width * num_bytes % x == 0)
    return plgpu.TilingTransform((8, int(swizzle / num_bytes))), plgpu.SwizzleTransform(swizzle)


def check_heads(call: Call, dtypes) -> None:
    """Raises NotImplementedError if the kernels do not support a call's dtype, head dim or group."""
    pool = call.pool.kv
    if pool.dtype not in dtypes:
        supported = ", ".join(str(jnp.dtype(x)) for x in dtypes)
        raise NotImplementedError(f"keys and values in {pool.dtype}; this kernel takes {supported}")
    if (h := pool.shape[5]) not in (64, 96, 128, 256):
        raise NotImplementedError(f"a head dim of {h}; this kernel takes 64, 96, 128 and 256")
    if call.group > ROWS:
        raise NotImplementedError(f"{call.group} query heads to a kv head; this kernel takes up to {ROWS}")


def int32(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def numbers_of(call: Call) -> jax.Array:
    """The numbers of a call that kernels read on the device: the effective pattern's, then the layer."""
    return jnp.stack([int32(x) for x in (*call.effective_pattern, call.layer)])


def launch(
    name: str,
    body,
    grid,
    *,
    out_type,
    scratch_types,
    interpret,
    warpgroups: int = 1,
    reduction_bytes: int = 0,
    auto_barriers: bool = True,
):
    """A kernel of `body` for blocks of threads of a grid of one axis.

    Args:
      reduction_bytes: of shared memory, for reductions over rows of a wgmma, which cross warps.
      auto_barriers: the warps of a warpgroup meet around each store to shared memory and before each copy. Otherwise
        the body sets these points by `commit_smem`.
    """
    parameters = interpreter.parameters(interpret)
    return plgpu.kernel(
        interpreter.interpreted(body) if parameters else body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=grid,
        grid_names=("index",),
        kernel_name=name,
        # Given explicitly: the default differs between versions of jax.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=not auto_barriers,
            reduction_scratch_bytes=reduction_bytes,
        ),
        interpret=parameters,
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="group" if warpgroups > 1 else None,
    )


def load(ref, index) -> jax.Array:
    """ref[index] from global memory in whatever layout is needed; Mosaic requires a request for slow ones."""
    if interpreter.loads_plainly():
        return ref[index]
    if jax.__version_info__ < (0, 11):  # takes the index apart
        return plgpu.load(ref, index, optimized=False)
    return plgpu.load(ref.at[index], optimized=False)  # pyright: ignore[reportCallIssue]


def fetch_rows(ref, index, to, barrier) -> None:
    """Asks for the rows of ref[index]; where they are fewer than 8, also for zeros in the rows of `to` after them."""
    part = ref.at[index]
    if ref.shape[1] < to.shape[0]:
        # TMA reads zeros beyond an array. jax refuses such rows where it knows their start.
        part = ref.at[index, pl.ds(index * 0, to.shape[0])]
    plgpu.copy_gmem_to_smem(part, to, barrier)


def store(ref, index, x) -> None:
    """Stores x to ref[index] in global memory from whatever layout it has."""
    slow: Any = getattr(plgpu, "store", None)
    if slow is None or interpreter.loads_plainly():
        ref[index] = x
    else:  # jax 0.12, where plain stores must have the layout that Mosaic prefers
        slow(ref.at[index], x, optimized=False)


def finished(top, total, sink=None):
    """The factor for a sum of values weighted by exp2(score - top), and the natural log-sum-exp.

    Args:
      top, total: the largest score in base 2, -inf where nothing was seen, and the sum of the weights.
      sink: learned sink logits in base 2: one more score each, without a value.
    """
    seen = top > -jnp.inf
    if sink is None:
        base, fade = jnp.where(seen, top, 0.0), 1.0
    else:
        new_top = jnp.maximum(top, sink)
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        fade = jnp.exp2(top - base)
        total = total * fade + jnp.exp2(sink - base)
    total = jnp.where(total == 0.0, 1.0, total)
    return fade / total, jnp.where(seen, base * (1 / LOG2E) + jnp.log(total), -jnp.inf)


def key_positions(unit_starts, size: int, columns: int = TILE_KV):
    """Text positions [columns] of slots, from those where their units of `size` slots begin."""
    slot = lax.broadcasted_iota(jnp.int32, (columns,), 0)
    positions = slot + unit_starts[0]
    for i, start in enumerate(unit_starts[1:], 1):
        positions = jnp.where(slot >= i * size, slot + (start - i * size), positions)
    return positions
