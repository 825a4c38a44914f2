"""Root mean square norms on a CPU, as a custom call into C++."""

from __future__ import annotations

import jax
import numpy as np

from ksana_jax.native.shapes import check_shape
from ksana_jax.native.target import DTYPES, STORED, target


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
