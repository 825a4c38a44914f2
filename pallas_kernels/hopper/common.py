"""What the Hopper kernels share: their configuration, matrices in shared memory, the call."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper import interpreter

ROWS = 64  # of a wgmma
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """What a kernel is compiled for.

    rows: queries x query heads of a group, a multiple of 8, at most 64. num_workers: blocks of threads.
    stages: pieces of keys and values that each of them holds at once. codes: dtype of a quantised pool; dtype is
    that of what is multiplied, 16 bits.
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

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block of threads: as many as have registers for the output."""
        return 2 if self.head_dim > 128 else 1

    @property
    def width(self) -> int:
        """Columns of the output, and of keys and values in shared memory, of one warpgroup."""
        return self.head_dim // self.warpgroups

    @property
    def columns(self) -> int:
        """Columns of the output that are computed together."""
        return 64 if self.head_dim % 64 == 0 else 32

    @property
    def staged(self) -> int:
        """Columns of the output that wait in shared memory at once. With a second query only 32 leave room for two
        blocks of threads on a multiprocessor: 113 KB each at a head dim of 128; 16 if there is a tile for widening."""
        return (16 if self.codes else 32) if self.num_sink_queries else self.columns


def layout(width: int, num_bytes: int | float):
    """Layout in shared memory of matrices [..., width]: what wgmma and TMA want, free of bank conflicts.

    Args:
      num_bytes: of a number; a half where it has 4 bits.
    """
    swizzle = next(x for x in (128, 64, 32) if width * num_bytes % x == 0)
    return plgpu.TilingTransform((8, int(swizzle / num_bytes))), plgpu.SwizzleTransform(swizzle)


def check_heads(q, pool, dtypes) -> None:
    """Raises NotImplementedError where kernels of attention lack the dtype, head dim or group of q [S, Q, N, H]."""
    num_heads, h = q.shape[2:]
    if pool.dtype not in dtypes:
        taken = ", ".join(str(jnp.dtype(x)) for x in dtypes)
        raise NotImplementedError(f"keys and values in {pool.dtype}; this kernel takes {taken}")
    if h not in (64, 96, 128, 256):
        raise NotImplementedError(f"a head dim of {h}; this kernel takes 64, 96, 128 and 256")
    if (group := num_heads // pool.shape[3]) > ROWS:
        raise NotImplementedError(f"{group} query heads to a kv head; this kernel takes up to {ROWS}")


def sinks_of_rows(sink_logits, num_kv_heads: int, group: int, queries: int) -> jax.Array:
    """Learned sink logits in base 2 of the rows of each kv head, queries x query heads: [K, 64]; -inf without any."""
    sinks = jnp.full((num_kv_heads, 1, group), -jnp.inf, jnp.float32)
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(num_kv_heads, 1, group) * LOG2E
    sinks = jnp.broadcast_to(sinks, (num_kv_heads, queries, group)).reshape(num_kv_heads, -1)
    return jnp.pad(sinks, ((0, 0), (0, ROWS - queries * group)))


def int32(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def call(name: str, body, grid, *, out_type, scratch_types, interpret, warpgroups: int = 1):
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
            reduction_scratch_bytes=0,  # rows of a wgmma are reduced within a warp
        ),
        interpret=parameters,
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="group" if warpgroups > 1 else None,
    )


def load(ref, index) -> jax.Array:
    """ref[index] from global memory in whatever layout is needed; Mosaic wants to be asked for slow ones."""
    if interpreter.loads_plainly():
        return ref[index]
    if jax.__version_info__ < (0, 11):  # takes the index apart
        return plgpu.load(ref, index, optimized=False)
    return plgpu.load(ref.at[index], optimized=False)  # pyright: ignore[reportCallIssue]
