"""Products of few rows on Hopper: checks a call, plans how it runs, and runs it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Kernel, Product
from pallas_kernels.hopper.common import ROWS
from pallas_kernels.hopper.product_kernel import Config
from pallas_kernels.hopper.product_kernel import multiply as multiply_kernel
from pallas_kernels.hopper.schedule import NUM_PROCESSORS
from pallas_kernels.product_reference import check

# Rows of x that registers have room for.
MAX_ROWS = 64
# Shared memory of a multiprocessor for pieces under way, and the most of it that one block of threads takes.
SHARED_BYTES, MOST_BYTES = 212 * 1024, 200 * 1024
# Depth that is read together, the best first.
PIECES = (256, 128, 64)
# Minimum saving where XLA adds up parts of a product, or a residual, in a separate launch: 1.3 us to start
# it, and the latency of its bytes twice.
SPARED_US = 2.0
# Facts of an H200: bytes of weights a second that products of few rows read, measured (`experiments/gpu/h200`); bytes a
# second from the L2, of an array just written (Chips and Cheese, 2023, on an H100 PCIe); bytes that a multiprocessor
# receives from the L2 in a cycle, half of its shared memory's rate, assumed; the boost clock.
WEIGHT_BYTES_PER_S, L2_BYTES_PER_S, CORE_BYTES_PER_CYCLE, CLOCK_HZ = 3.96e12, 5.5e12, 64, 1.98e9
# Somewhat more than the chip reads between two launches, 2 us of memory; `Product.ahead_bytes`.
AHEAD_BYTES = 12 << 20
# With more rows, XLA's products without a gate were as fast or faster: q, k and v of Llama-8B with 64 rows by 4.7 %.
FEW_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a kernel runs.

    tiles: of 64 columns of the result, of each matrix, that a block of threads computes; by default see `Plan.of`.
    piece: of the depth; stages: pieces that a block of threads holds at once; by default see `Plan.of`.
    interpret: True runs the kernel on the CPU, in jax's interpreter of GPU programs; or that interpreter's parameters.
    """

    tiles: int | None = None
    piece: int | None = None
    stages: int | None = None
    interpret: Any = False


class Plan(NamedTuple):
    """Plan of a product; fields as in `Tuning`. us: minimum microseconds for its bytes."""

    tiles: int
    piece: int
    stages: int
    us: float

    @property
    def columns(self) -> int:
        """Columns of the result of a block of threads."""
        return self.tiles * ROWS

    @classmethod
    def of(cls, rows: int, depth: int, width: int, parts: int, tuning: Tuning = Tuning()) -> Plan:
        """Returns the plan for matrices [width, depth].

        Raises:
          NotImplementedError: it cannot be divided into tiles and pieces.
        """
        tiles = [n for n in ([tuning.tiles] if tuning.tiles else (1, 2)) if width % (n * ROWS) == 0]
        pieces = [n for n in ([tuning.piece] if tuning.piece else PIECES) if depth % n == 0]
        if not tiles or not pieces:
            multiples = f"[{(tuning.tiles or 1) * ROWS}, {tuning.piece or PIECES[-1]}]"
            raise NotImplementedError(f"a matrix [{width}, {depth}]; this kernel takes multiples of {multiples}")
        us, chosen = min((bound_us(rows, depth, width, parts, n), n) for n in tiles)
        blocks = -(-width // (chosen * ROWS * NUM_PROCESSORS))  # of a multiprocessor
        column_bytes = 2 * (rows + parts * chosen * ROWS)
        room = min(SHARED_BYTES // blocks, MOST_BYTES) // column_bytes
        # Large pieces meet less often; three of them are enough for copies to be under way.
        piece = next((n for n in pieces if room >= 3 * n), pieces[-1])
        return cls(chosen, piece, min(max(tuning.stages or room // piece, 2), depth // piece), us)


def bound_us(rows: int, depth: int, width: int, parts: int, tiles: int = 0) -> float:
    """Returns the minimum microseconds for the bytes of a product, if each block of threads computes `tiles`
    times 64 columns and reads all rows again; with 0, for the bytes of the matrices alone."""
    weights = 2 * parts * width * depth
    us = weights / WEIGHT_BYTES_PER_S * 1e6
    if not tiles:
        return us
    blocks, again = width // (tiles * ROWS), 2 * rows * depth
    of_processor = -(-blocks // NUM_PROCESSORS) * (again + weights / blocks)
    all_bytes = weights + blocks * again
    return max(us, all_bytes / L2_BYTES_PER_S * 1e6, of_processor / CORE_BYTES_PER_CYCLE / CLOCK_HZ * 1e6)


def plan(call: Product, tuning: Tuning = Tuning()) -> Plan:
    """Returns the plan for a call.

    Raises:
      NotImplementedError: another type than bfloat16, a number of rows that is no multiple of 8 up to 64, or a matrix
        that is no multiple of the kernel's tiles.
    """
    rows, depth = call.x.shape
    given = [x for x in (call.x, call.w, call.norm, call.bias, call.residual) if x is not None]
    if other := next((x.dtype for x in given if x.dtype != jnp.bfloat16), None):
        raise NotImplementedError(f"arrays of {other}; this kernel takes bfloat16")
    if rows % 8 or not 0 < rows <= MAX_ROWS:
        raise NotImplementedError(f"{rows} rows; this kernel takes multiples of 8 up to {MAX_ROWS}")
    return Plan.of(rows, depth, call.w.shape[0] // call.parts, call.parts, tuning)


def pays(call: Product) -> bool:
    """True if the kernel supports a call, saves more time than its blocks of threads take to read the rows again, and
    has not lost against XLA on an H200 (`experiments/gpu/README.md`): of many rows, only the gated product won."""
    try:
        found = plan(call)
    except NotImplementedError:
        return False
    rows, depth = call.x.shape
    if rows > FEW_ROWS and call.activation is None:
        return False
    return found.us - bound_us(rows, depth, call.w.shape[0] // call.parts, call.parts) <= SPARED_US


# A separate jit, so that all layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames="tuning")
def multiply(call: Product, work: None = None, *, tuning: Tuning) -> jax.Array:
    """Multiplies; `pallas_kernels.contract` has the arguments, `plan` the limits of support."""
    check(call)
    (rows, depth), width = call.x.shape, call.w.shape[0] // call.parts
    how = plan(call, tuning)
    config = Config(
        rows=rows,
        depth=depth,
        width=width,
        parts=call.parts,
        columns=how.columns,
        piece=how.piece,
        stages=how.stages,
        eps=call.eps,
        plus_one=call.plus_one,
        activation=call.activation,
        ahead=_ahead(call, width // how.columns),
    )
    w = call.w.reshape(call.parts, width, depth)
    bias = None if call.bias is None else call.bias.reshape(call.parts, width)
    ahead = None if config.ahead is None else call.ahead
    return multiply_kernel(call.x, w, call.norm, bias, call.residual, ahead, config, tuning.interpret)


def _ahead(call: Product, blocks: int) -> tuple[int, int] | None:
    """Rows of `Product.ahead` for each of `blocks` blocks of threads, and first columns of them, in whole lines of a
    cache."""
    if call.ahead is None:
        return None
    rows, depth = call.ahead.shape
    columns = columns_ahead(rows, depth, call.ahead_bytes)
    return (-(-rows // blocks), columns) if columns else None


def columns_ahead(rows: int, depth: int, num_bytes: int) -> int:
    """Returns how many columns of a matrix [rows, depth] of 16 bits take at most num_bytes, in whole lines of a
    cache."""
    return min(num_bytes // (2 * rows), depth) // ROWS * ROWS


KERNEL = Kernel(multiply, Tuning())
