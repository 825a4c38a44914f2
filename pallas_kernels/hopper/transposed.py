"""Stores of matrices the other way round, from the registers of a wgmma: what layout inference has no rule for.

The interpreter of jax does not run them: there a kernel transposes.
"""

from __future__ import annotations

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref


def to_shared(ref, x) -> None:
    """Stores x [64 n, columns] to ref [columns, 64 n] in shared memory, which has to be tiled."""
    plgpu.transpose_ref(ref, (1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def to_global(ref, x) -> None:
    """Stores the first R columns of x [64 n, columns] to ref [R, 64 n] in global memory."""
    num_rows, num_columns = ref.shape[0], x.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx, to, x):
        del ctx
        limit = arith.constant(ir.IndexType.get(), num_rows)

        def one(value, index):
            row, column = index
            if num_rows == num_columns:
                memref.store(value, to, [column, row])
                return
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, column, limit)):
                memref.store(value, to, [column, row])

        x.foreach(one)

    store(ref, x)
