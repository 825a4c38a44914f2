"""Loads and stores of transposed matrices, to and from the registers of a wgmma.

jax's interpreter does not run them: there a kernel transposes.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def to_shared(ref, x) -> None:
    """Stores x [64 n, columns] to ref [columns, 64 n] in shared memory, which has to be tiled."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def from_shared(ref):
    """Loads ref [columns, 64 n] in shared memory, which has to be tiled, as [64 n, columns]."""
    return plgpu.layout_cast(ref.transpose((1, 0))[...], plgpu.Layout.WGMMA_TRANSPOSED)


def to_global(ref, x, transposed: bool = True) -> None:
    """Stores the first R columns of x [64 n, columns] to ref [R, 64 n] in global memory; otherwise its first R rows.

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
            row, column = reversed(index) if transposed else index
            there = arith.cmpi(arith.CmpIPredicate.ult, row, limit)
            # For rows beyond the matrix, an address inside, which is not written to.
            place = utils.memref_slice(to, (arith.select(there, row, arith.constant(limit.type, 0)), column))
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
