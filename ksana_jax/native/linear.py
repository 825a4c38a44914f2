"""Products with weights on a CPU, as a custom call into C++."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.native.target import STORED, target

DTYPES = ("float32", "bfloat16")


def linear(x: jax.Array, w: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    """Multiplies x [..., in] by w [out, in] and adds b [out]; the contract of `models.layers.linear`.

    A row of the result depends on that row of x alone, bit by bit, whatever the other rows and their number.

    Raises:
      NotImplementedError: x and w are not both float32 or both bfloat16.
    """
    if x.dtype != w.dtype or x.dtype.name not in DTYPES:
        raise NotImplementedError(f"{x.dtype} times {w.dtype}; native products have both in {' or '.join(DTYPES)}")
    dtype = jnp.dtype(dtype or x.dtype)
    asked = jnp.dtype(jnp.float32) if b is not None or dtype.name not in DTYPES else dtype
    result = jax.ShapeDtypeStruct((*x.shape[:-1], len(w)), asked)
    stored, of_result = (np.int32(STORED[d.name]) for d in (x.dtype, asked))
    y = jax.ffi.ffi_call(target("ksana_linear"), result)(x, w, stored=stored, asked=of_result)
    return (y if b is None else y + b).astype(dtype)
