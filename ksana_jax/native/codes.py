"""Checks matrices that are not packed, of numbers or of codes, before custom calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.native.shapes import BLOCK, check_shape
from ksana_jax.native.target import DTYPES


def check_types(x: jax.Array, w: jax.Array, scales: jax.Array | None) -> None:
    """Checks the types of rows, and of a matrix or a stack of them, whose codes have scales."""
    kind = x.dtype if scales is None else jnp.float8_e4m3fn if scales.ndim == w.ndim else jnp.int8
    if x.dtype.name not in DTYPES or w.dtype != kind:
        names = " or ".join(DTYPES)
        raise NotImplementedError(
            f"{x.dtype} times {w.dtype}; native products have both in {names}, or int8 or float8_e4m3fn with scales"
        )


def check_scales(scales: jax.Array | None, shape: tuple[int, ...], reason: str) -> None:
    """Checks that scales are those of a matrix [out, in], or of a stack of them."""
    if scales is None:
        return
    groups = scales.shape[len(shape) - 1 :]
    check_shape("scales", scales.shape, (*shape[:-1], *groups), reason)
    if groups and shape[-1] % (BLOCK * max(groups[0], 1)):
        raise ValueError(f"scales have {groups[0]} groups, which must be of a multiple of {BLOCK} numbers: {reason}")
