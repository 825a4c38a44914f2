"""Loads and stores of transposed matrices, to and from the registers of a wgmma, and stores of its first rows.

jax's interpreter does not run them: there a kernel transposes.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def to_shared(ref, x) -> None:
    """Stores x [64 n, columns] to ref [columns, 64 n] in shared memory, which has to be tiled."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def from_shared(ref):
    """Loads ref [columns, 64 n] in shared memory, which has to be tiled, as [64 n, columns]."""
    return plgpu.layout_cast(ref.transpose((1, 0))[...], plgpu.Layout.WGMMA_TRANSPOSED)


def to_global(ref, x) -> None:
    """Stores the first R columns of x [64 n, columns] to ref [R, 64 n] in global memory.

    Layout inference has no transposed store to global memory, nor, on its way there, one of fewer than 8 rows to shared
    memory.
    """
    num_rows = ref.shape[0]

    def store(ctx, to, x):
        del ctx
        bits = ir.IntegerType.get_signless(utils.bitwidth(x.mlir_dtype))
        letter = {16: "h", 32: "r"}[bits.width]
        limit = arith.constant(ir.IndexType.get(), num_rows)
        text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.b{bits.width} [$0], $1; }}"

        def one(value, index):
            row, column = index
            there = arith.cmpi(arith.CmpIPredicate.ult, column, limit)
            # For columns beyond the matrix, an address inside, which is not written to.
            place = utils.memref_slice(to, (arith.select(there, column, arith.constant(limit.type, 0)), row))
            given = [
                utils.memref_ptr(place),
                utils.bitcast(value, bits),
                arith.extui(ir.IntegerType.get_signless(32), there),
            ]
            # A predicate instead of a branch: the threads of a warp stay together.
            llvm.inline_asm(ir.Type.parse("!llvm.void"), given, text, f"l,{letter},r", has_side_effects=True)

        x.foreach(one)

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    inlined(store)(ref, x)


def rows_to_global(ref, x) -> None:
    """Stores the first R rows of x [64, columns] to ref [R, columns] in global memory.

    All of a thread's stores have one address and offsets that are known when it is compiled: with an address each, they
    would take the registers of the accumulators around them.
    """
    num_rows, columns = ref.shape[0], x.shape[1]

    def store(ctx, to, x):
        del ctx
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        strides, _ = ir.MemRefType(to.type).get_strides_and_offset()
        row, column = next(iter(x.layout.thread_idxs(x.shape)))
        base = utils.memref_ptr(utils.memref_slice(to, (row, column)))
        words = utils.bitwidth(x.mlir_dtype) * 2 // 32  # of the two neighbours in a register
        places = [f"${i + 1}" for i in range(words)]
        kind = f"v2.b32 [$0 + {{}}], {{{{{', '.join(places)}}}}}" if words == 2 else "b32 [$0 + {}], $1"
        there = {}
        tile = x.layout.tiling.tile_strides((columns, 1))
        for where in np.ndindex(x.registers.shape):
            down, right = divmod(sum(int(i) * n for i, n in zip(where, tile)), columns)
            if down not in there:
                limit = arith.constant(index, num_rows - down)
                there[down] = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.slt, row, limit))
            offset = (down * strides[0] + right) * words * 2
            values = utils.bitcast(x.registers[where], ir.VectorType.get((words,), i32))
            given = [llvm.extractelement(values, arith.constant(i32, i)) for i in range(words)]
            text = f"{{{{ .reg .pred p; setp.ne.b32 p, ${words + 1}, 0; @p st.{kind}; }}}}".format(offset)
            letters = f"l,{'r,' * words}r"
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [base, *given, there[down]], text, letters, has_side_effects=True
            )

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    inlined(store)(ref, x)
