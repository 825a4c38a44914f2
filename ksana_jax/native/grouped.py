"""Products of rows with the weights of their group on a CPU, as a custom call into C++."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.native.codes import check_scales, check_types
from ksana_jax.native.operators import Weights, forms, rounded_rows
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

    Like `operators.linear`, for rows that are sorted by group: the first counts[0] are of the first group. The matrix
    of a group without rows is not read.

    Args:
      counts: int32 [groups], of rows; products of the rows after those are zeros.
      scales: float32 [groups, out], or [groups, out, parts of a row].

    Raises:
      NotImplementedError: x is neither float32 nor bfloat16, or w is not of x's dtype, or of int8 or float8_e4m3fn with
        scales.
      ValueError: shapes do not fit.
    """
    check_types(x, w, scales)
    (groups, num_out, _), reason = w.shape, f"x is {list(x.shape)}, the matrices {list(w.shape)}"
    check_shape("each matrix", w.shape[1:], (num_out, x.shape[-1]), reason)
    check_scales(scales, w.shape, reason)
    check_shape("counts", counts.shape, (groups,), reason)
    if b is not None:
        check_shape("the bias", b.shape, (len(x), num_out), reason)
    dtype = jnp.dtype(dtype or x.dtype)
    asked = jnp.dtype(jnp.float32) if b is not None or dtype.name not in DTYPES else dtype
    stored, of_result = (np.int32(STORED[d.name]) for d in (x.dtype, asked))
    given = jnp.zeros(0, jnp.float32) if scales is None else scales
    call = jax.ffi.ffi_call(target("ksana_grouped_linear"), jax.ShapeDtypeStruct((len(x), num_out), asked))
    y = call(x, w, given, counts.astype(jnp.int32), stored=stored, asked=of_result)
    return (y if b is None else y + b).astype(dtype)


def by_head(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies x [..., N, in] by a matrix for each head, w [N, out, in]: [..., N, out]."""
    rows = jnp.moveaxis(x, -2, 0)
    counts = jnp.full(len(w), rows[0].size // x.shape[-1], jnp.int32)
    y = grouped_linear(rows.reshape(-1, x.shape[-1]), w, counts)
    return jnp.moveaxis(y.reshape(*rows.shape[:-1], -1), 0, -2)


def grouped_blocks(x: jax.Array, w: Any, counts: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    """The same with packed matrices in blocks, which round x to codes as `native.operators.project` does.

    Args:
      w: a stack [groups, out, in] of `PackedBlocks`.

    Raises:
      NotImplementedError: x is neither float32 nor bfloat16. ValueError: shapes do not fit.
    """
    if x.dtype.name not in DTYPES:
        raise NotImplementedError(f"activations are {x.dtype}; native products have {' or '.join(DTYPES)}")
    reason, (groups, num_out, _) = f"x is {list(x.shape)}, the matrices {list(w.shape)}", w.shape
    all_of = Weights.of(w, None)
    one = all_of._replace(words=jax.ShapeDtypeStruct(all_of.words.shape[1:], all_of.words.dtype))
    one.check("each matrix", x.dtype, (num_out, x.shape[-1]), reason)
    check_shape("counts", counts.shape, (groups,), reason)
    if b is not None:
        check_shape("the bias", b.shape, (len(x), num_out), reason)
    dtype = jnp.dtype(dtype or x.dtype)
    asked = jnp.dtype(jnp.float32) if b is not None or dtype.name not in DTYPES else dtype
    stored, of_result = (np.int32(STORED[d.name]) for d in (x.dtype, asked))
    results = (jax.ShapeDtypeStruct((len(x), num_out), asked), *rounded_rows(x.shape[:1], x.shape[1], one))
    call = jax.ffi.ffi_call(target("ksana_grouped_blocks"), results)
    given = all_of.arguments(x.dtype)
    y, *_ = call(x, counts.astype(jnp.int32), *given, stored=stored, asked=of_result, forms=forms([one]))
    return (y if b is None else y + b).astype(dtype)
