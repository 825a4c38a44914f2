"""Products of rows that are sorted by expert, in C++: `Operators.grouped` on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from ksana_jax.models.block_matrix import PackedBlocks
from ksana_jax.models.int8_matrix import Int8Matrix
from ksana_jax.models.matrix import Matrix
from ksana_jax.native.grouped import grouped_blocks, grouped_linear


def grouped(w: jax.Array | Matrix) -> Callable[..., jax.Array] | None:
    """Returns the products with a stack of matrices [E, out, in], see `native.grouped`.

    Returns:
      (x [P, in], counts=[E], b=[P, out] or None) -> [P, out]; None if the matrices are neither numbers, nor codes of
      `int8`, nor packed blocks.
    """
    if isinstance(w, PackedBlocks):
        return functools.partial(grouped_blocks, w=w)
    if isinstance(w, Int8Matrix) and not w.rounds_inputs:
        return functools.partial(grouped_linear, w=w.codes, scales=w.scales)
    return None if isinstance(w, Matrix) else functools.partial(grouped_linear, w=w)
