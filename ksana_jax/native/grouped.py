"""Products of rows with the weights of their group on a CPU, as a custom call into C++."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.native.shapes import check_shape
from ksana_jax.native.target import DTYPES, STORED, target


def grouped_linear(
    x: jax.Array,
    w: jax.Array,
    counts: jax.Array,
    b: jax.Array | None = None,
    *,
    dtype=None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Multiplies rows x [T, in] by the matrix of their group, w [groups, out, in], and adds b [T, out]: [T, out].

    Like `native.linear`, for rows that are sorted by group: the first counts[0] are of the first group. The matrix of a
    group without rows is not read.

    Args:
      counts: int32 [groups], of rows; products of the rows after those are zeros. scales: float32 [groups, out].

    Raises:
      NotImplementedError: x is neither float32 nor bfloat16, or w is not of x's dtype, or of int8 with scales.
      ValueError: shapes do not fit.
    """
    if x.dtype.name not in DTYPES or w.dtype != (x.dtype if scales is None else jnp.int8):
        names = " or ".join(DTYPES)
        raise NotImplementedError(f"{x.dtype} times {w.dtype}; native products have both in {names}, or scaled int8")
    (groups, num_out, _), reason = w.shape, f"x is {list(x.shape)}, the matrices {list(w.shape)}"
    check_shape("each matrix", w.shape[1:], (num_out, x.shape[-1]), reason)
    vectors = (("counts", counts, (groups,)), ("the bias", b, (len(x), num_out)), ("scales", scales, (groups, num_out)))
    for name, vector, wanted in vectors:
        if vector is not None:
            check_shape(name, vector.shape, wanted, reason)
    dtype = jnp.dtype(dtype or x.dtype)
    asked = jnp.dtype(jnp.float32) if b is not None or dtype.name not in DTYPES else dtype
    stored, of_result = (np.int32(STORED[d.name]) for d in (x.dtype, asked))
    given = jnp.zeros(0, jnp.float32) if scales is None else scales
    call = jax.ffi.ffi_call(target("ksana_grouped_linear"), jax.ShapeDtypeStruct((len(x), num_out), asked))
    y = call(x, w, given, counts.astype(jnp.int32), stored=stored, asked=of_result)
    return (y if b is None else y + b).astype(dtype)
