"""Products of few rows with a matrix for Hopper, in Mosaic GPU, fused with their neighbours. Bound by memory.

Each block of threads is one warpgroup that computes some columns of the result for all rows. Operands are swapped, as
in `decode_swapped`: rows of the matrix are the 64 rows of a wgmma, the few rows of x its columns. Per piece of x's
depth:

    TMA                     the matrix [columns, piece] and x [rows, piece] into one of `stages` buffers
    registers, with a norm  squares of x are summed, x times the norm's weight goes back to shared memory
    wgmma 64 x rows x piece for each 64 columns, summed in float32 in place

While a piece is multiplied, the next one is prepared. In the end the missing part of the norm, one factor for each
row, multiplies the sums. Bias, gated activation and residual follow, and the result leaves through shared memory,
which transposes it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import transposed
from pallas_kernels.hopper.common import LOG2E, ROWS, int32, launch, layout, load

BOX = 256  # numbers along each side of a TMA box, at most


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration for which a kernel is compiled.

    rows, depth: of x, [rows, depth]. width: columns of the result. parts: matrices of `width` rows, 2 where one gates.
    columns: of the result that a block of threads computes. piece: of the depth. stages: pieces that it holds at once,
    at least two of several.
    plus_one: 1 is added to the norm's weight. ahead: rows of a later kernel's matrix, and first columns of them, that a
    block of threads asks the L2 for; None without.
    """

    rows: int
    depth: int
    width: int
    parts: int
    columns: int
    piece: int
    stages: int
    eps: float
    plus_one: bool
    activation: str | None
    ahead: tuple[int, int] | None = None

    @property
    def num_pieces(self) -> int:
        return self.depth // self.piece


class Refs(NamedTuple):
    """Arrays of the kernel, in its order: inputs, the output, scratch.

    _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive.
    """

    x_g: Any
    w_g: Any
    norm_g: Any
    bias_g: Any
    residual_g: Any
    ahead_g: Any
    out_g: Any
    x_s: Any
    w_s: Any
    norm_s: Any
    residual_s: Any
    out_s: Any
    piece_bar: Any
    residual_bar: Any


def _multiply(*arrays, config: Config, plain: bool) -> None:
    """The kernel. plain: as jax's interpreter takes it."""
    refs = Refs(*arrays)
    columns = pl.ds(lax.axis_index("index") * config.columns, config.columns)
    if refs.residual_g is not None:
        plgpu.copy_gmem_to_smem(refs.residual_g.at[:, columns], refs.residual_s, refs.residual_bar)
    for stage in range(config.stages):
        _fetch(refs, config, columns, int32(stage), int32(stage))
    sums = (jnp.zeros((config.columns, config.rows), jnp.float32),) * config.parts
    squares = ()
    plgpu.barrier_wait(refs.piece_bar.at[0])
    if refs.norm_g is not None:
        squares = jnp.zeros((ROWS, config.rows), jnp.float32)
        if not plain:
            squares = plgpu.layout_cast(squares, plgpu.Layout.WGMMA_TRANSPOSED)
        squares = _weigh(refs, config, int32(0), squares, plain)

    def turn(i, carry):
        sums, squares = carry
        stage, following = (lax.rem(j, int32(config.stages)) for j in (i, i + 1))

        def meanwhile():
            """While the tensor cores multiply: prepares the next piece."""
            plgpu.barrier_wait(refs.piece_bar.at[following])
            return squares if refs.norm_g is None else _weigh(refs, config, following, squares, plain)

        sums, squares = _products(refs, stage, sums, meanwhile, plain)
        plgpu.commit_smem()  # a barrier: all warps have read the piece
        ahead = i + config.stages
        pl.when(ahead < config.num_pieces)(lambda: _fetch(refs, config, columns, ahead, stage))
        return sums, squares

    last = config.num_pieces - 1
    sums, squares = lax.fori_loop(0, last, turn, (sums, squares))
    if config.ahead is not None and not plain:
        _ask_ahead(refs, config)
    factor = functools.partial(_factor, refs, config, squares, plain)
    sums, factor = _products(refs, int32(last % config.stages), sums, factor, plain)
    _store(refs, config, columns, sums, factor, plain)


def _fetch(refs: Refs, config: Config, columns, i, stage) -> None:
    """Asks for piece i."""
    depth, arrived = pl.ds(i * config.piece, config.piece), refs.piece_bar.at[stage]
    for part in range(config.parts):
        plgpu.copy_gmem_to_smem(refs.w_g.at[part, columns, depth], refs.w_s.at[stage, part], arrived)
    plgpu.copy_gmem_to_smem(refs.x_g.at[:, depth], refs.x_s.at[stage], arrived)
    if refs.norm_g is not None:
        plgpu.copy_gmem_to_smem(refs.norm_g.at[depth], refs.norm_s.at[stage], arrived)


def _ask_ahead(refs: Refs, config: Config) -> None:
    """Prefetches into the L2 the first data of a later kernel, while memory would be idle: between two launches.

    A hint without a wait. Others have measured the gain of such requests at the end of a kernel, on another
    chip: 3.7 % of a decode step (github.com/Neroued/ninfer, pull request 69).
    """
    assert config.ahead is not None
    rows, columns = config.ahead
    first = lax.axis_index("index") * rows
    for row, column in itertools.product(range(0, rows, BOX), range(0, columns, BOX)):
        some_rows, some_columns = pl.ds(first + row, min(BOX, rows - row)), pl.ds(column, min(BOX, columns - column))
        plgpu.async_prefetch(refs.ahead_g.at[some_rows, some_columns])


def _weigh(refs: Refs, config: Config, stage, squares, plain: bool):
    """Multiplies a piece of x, in place, with the norm's weight; returns squares [64, rows] plus the piece's."""
    for begin in range(0, config.piece, ROWS):
        part = pl.ds(begin, ROWS)
        ref = refs.x_s.at[stage, :, part]
        x = (ref[...].T if plain else transposed.from_shared(ref)).astype(jnp.float32)
        weight = refs.norm_s[stage, part].astype(jnp.float32)
        if config.plus_one:
            weight = weight + 1.0
        squares = squares + x * x
        x = (x * lax.broadcast_in_dim(weight, x.shape, [0])).astype(ref.dtype)
        if plain:
            ref[...] = x.T
        else:
            transposed.to_shared(ref, x)
    plgpu.commit_smem()
    return squares


def _products(refs: Refs, stage, sums, meanwhile, plain: bool):
    """Returns sums, each [columns, rows], plus a piece's products, and the result of `meanwhile` during these."""

    def multiply(*accs):
        for part, acc in enumerate(accs):
            if not plain:  # in place, which jax's interpreter does not support
                acc[...] = sums[part]
            plgpu.wgmma(acc, refs.w_s.at[stage, part], refs.x_s.at[stage].transpose((1, 0)))
        found = meanwhile()
        return tuple(x + acc[...] if plain else acc[...] for x, acc in zip(sums, accs)), found

    return pl.run_scoped(multiply, *(plgpu.WGMMAAccumulatorRef(x.shape, jnp.float32) for x in sums))


def _factor(refs: Refs, config: Config, squares, plain: bool):
    """Factors that the sums of each row [rows] still need; () without a norm."""
    if refs.norm_g is None:
        return ()
    if not plain:
        squares = plgpu.layout_cast(squares, plgpu.Layout.WGMMA)
    return lax.rsqrt(squares.sum(axis=0) * (1 / config.depth) + config.eps)


def _store(refs: Refs, config: Config, columns, sums, factor, plain: bool) -> None:
    """Completes the sums and stores them."""
    if refs.norm_g is not None:
        sums = tuple(x * lax.broadcast_in_dim(factor, x.shape, [1]) for x in sums)
    if refs.bias_g is not None:
        bias = (load(refs.bias_g, (part, columns)).astype(jnp.float32) for part in range(config.parts))
        sums = tuple(x + lax.broadcast_in_dim(b, x.shape, [0]) for x, b in zip(sums, bias))
    out = sums[0] if config.activation is None else ACTIVATIONS[config.activation](sums[0]) * sums[1]
    out = out.astype(refs.out_g.dtype)
    if refs.residual_g is not None:
        plgpu.barrier_wait(refs.residual_bar)
        if not plain:
            out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        x = refs.residual_s[...].T if plain else transposed.from_shared(refs.residual_s)
        out = (x.astype(jnp.float32) + out.astype(jnp.float32)).astype(out.dtype)
    if plain:
        refs.out_s[...] = out.T
    else:
        transposed.to_shared(refs.out_s, out)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.out_s, refs.out_g.at[:, columns])
    plgpu.wait_smem_to_gmem(0)


def _silu(x):
    return x / (1.0 + jnp.exp2(x * -LOG2E))


def _gelu_tanh(x):
    return 0.5 * x * (1.0 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


# Functions of a gate, in float32, by the name in `contract.Product`.
ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def multiply(x, w, norm, bias, residual, ahead, config: Config, interpret: Any) -> jax.Array:
    """Returns the result [rows, width].

    Args:
      x: [rows, depth]. w: [parts, width, depth]. norm: [depth]; bias: [parts, width]; residual: [rows, width]; ahead:
        matrix of a later kernel; None without.
    """
    rows, columns, piece, stages = config.rows, config.columns, config.piece, config.stages
    tile = plgpu.SMEM((rows, columns), x.dtype, transforms=layout(columns, 2))
    kernel = launch(
        "hopper_product",
        functools.partial(_multiply, config=config, plain=bool(interpret)),
        (config.width // columns,),
        out_type=jax.ShapeDtypeStruct((rows, config.width), x.dtype),
        scratch_types=(
            plgpu.SMEM((stages, rows, piece), x.dtype, transforms=layout(piece, 2)),
            plgpu.SMEM((stages, config.parts, columns, piece), w.dtype, transforms=layout(piece, 2)),
            None if norm is None else plgpu.SMEM((stages, piece), norm.dtype),
            None if residual is None else tile,
            tile,
            plgpu.Barrier(num_arrivals=config.parts + 1 + (norm is not None), num_barriers=stages),
            plgpu.Barrier(),
        ),
        interpret=interpret,
        # One entry for each thread of 4 warps, for a sum over 64 rows.
        reduction_bytes=0 if norm is None else 128 * rows,
        auto_barriers=False,
    )
    return kernel(x, w, norm, bias, residual, ahead)
