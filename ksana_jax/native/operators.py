"""Products with weights, and norms, on a CPU: custom calls into C++."""

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
    if x.dtype.name not in DTYPES or w.dtype != (x.dtype if scales is None else jnp.int8):
        names = " or ".join(DTYPES)
        raise NotImplementedError(f"{x.dtype} times {w.dtype}; native products have both in {names}, or scaled int8")
    check_shape("the matrix", w.shape, (len(w), x.shape[-1]), f"x is {list(x.shape)}")
    for name, vector in (("the bias", b), ("scales", scales)):
        if vector is not None:
            check_shape(name, vector.shape, w.shape[:1], f"the matrix is {list(w.shape)}")
    dtype = jnp.dtype(dtype or x.dtype)
    asked = jnp.dtype(jnp.float32) if b is not None or dtype.name not in DTYPES else dtype
    result = jax.ShapeDtypeStruct((*x.shape[:-1], len(w)), asked)
    stored, of_result = (np.int32(STORED[d.name]) for d in (x.dtype, asked))
    given = jnp.zeros(0, jnp.float32) if scales is None else scales
    y = jax.ffi.ffi_call(target("ksana_linear"), result)(x, w, given, stored=stored, asked=of_result)
    return (y if b is None else y + b).astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, plus_one: bool = False) -> jax.Array:
    """Normalises x [..., D] with a weight [D]; the contract of `models.layers.rms_norm`, or of `rms_norm_plus_one`.

    A row of the result depends only on that row of x, bit by bit, whatever the other rows and their number.

    Raises:
      NotImplementedError: x and weight are not both float32 or both bfloat16.
      ValueError: the weight is not [D].
    """
    return called("ksana_rms_norm", x, weight, x.shape[-1:], eps=np.float32(eps), plus_one=np.bool_(plus_one))


def called(symbol: str, x: jax.Array, weight: jax.Array, shape: tuple[int, ...], **attributes: np.generic) -> jax.Array:
    """Calls a norm of the library, whose weight must have a shape."""
    if x.dtype != weight.dtype or x.dtype.name not in DTYPES:
        raise NotImplementedError(f"{x.dtype} and {weight.dtype}; native norms have both in {' or '.join(DTYPES)}")
    check_shape("the weight of a norm", weight.shape, shape, f"x is {list(x.shape)}")
    call = jax.ffi.ffi_call(target(symbol), jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, stored=np.int32(STORED[x.dtype.name]), **attributes)
