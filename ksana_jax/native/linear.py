"""Products with weights on a CPU, as a custom call into C++."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.native.shapes import check_shape
from ksana_jax.native.target import DTYPES, STORED, target


def linear(
    x: jax.Array, w: jax.Array, b: jax.Array | None = None, *, dtype=None, scales: jax.Array | None = None
) -> jax.Array:
    """Multiplies x [..., in] by w [out, in] and adds b [out]; the contract of `models.layers.linear`.

    A row of the result depends only on that row of x, bit by bit, whatever the other rows and their number.

    Args:
      scales: float32 [out], of rows of w, which then are int8 codes.

    Raises:
      NotImplementedError: x is neither float32 nor bfloat16, or w is not of x's dtype, or of int8 with scales.
      ValueError: w, b or scales do not fit x, or each other.
    """
    _check_types(x, w, scales)
    check_shape("the matrix", w.shape, (len(w), x.shape[-1]), f"x is {list(x.shape)}")
    for name, vector in (("the bias", b), ("scales", scales)):
        if vector is not None:
            check_shape(name, vector.shape, w.shape[:1], f"the matrix is {list(w.shape)}")
    dtype, asked = _of_result(x, b, dtype)
    result = jax.ShapeDtypeStruct((*x.shape[:-1], len(w)), asked)
    y = jax.ffi.ffi_call(target("ksana_linear"), result)(x, w, _given(scales), **_stored(x, asked))
    return (y if b is None else y + b).astype(dtype)


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

    Like `linear`, for rows that are sorted by group: the first counts[0] are of the first group. The matrix of a group
    without rows is not read.

    Args:
      counts: int32 [groups], of rows; rows after those have b, or zeros. scales: float32 [groups, out].

    Raises:
      NotImplementedError: as `linear`.
      ValueError: shapes do not fit.
    """
    _check_types(x, w, scales)
    (groups, num_out, _), reason = w.shape, f"x is {list(x.shape)}, the matrices {list(w.shape)}"
    check_shape("each matrix", w.shape[1:], (num_out, x.shape[-1]), reason)
    vectors = (("counts", counts, (groups,)), ("the bias", b, (len(x), num_out)), ("scales", scales, (groups, num_out)))
    for name, vector, wanted in vectors:
        if vector is not None:
            check_shape(name, vector.shape, wanted, reason)
    dtype, asked = _of_result(x, b, dtype)
    call = jax.ffi.ffi_call(target("ksana_grouped_linear"), jax.ShapeDtypeStruct((len(x), num_out), asked))
    y = call(x, w, _given(scales), counts.astype(jnp.int32), **_stored(x, asked))
    return (y if b is None else y + b).astype(dtype)


def _check_types(x: jax.Array, w: jax.Array, scales: jax.Array | None) -> None:
    if x.dtype.name not in DTYPES or w.dtype != (x.dtype if scales is None else jnp.int8):
        names = " or ".join(DTYPES)
        raise NotImplementedError(f"{x.dtype} times {w.dtype}; native products have both in {names}, or scaled int8")


def _of_result(x: jax.Array, b: jax.Array | None, dtype) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the dtype of the result, and that of products before a bias is added."""
    dtype = jnp.dtype(dtype or x.dtype)
    return dtype, jnp.dtype(jnp.float32) if b is not None or dtype.name not in DTYPES else dtype


def _given(scales: jax.Array | None) -> jax.Array:
    return jnp.zeros(0, jnp.float32) if scales is None else scales


def _stored(x: jax.Array, asked: jnp.dtype) -> dict[str, np.int32]:
    return {name: np.int32(STORED[d.name]) for name, d in {"stored": x.dtype, "asked": asked}.items()}
