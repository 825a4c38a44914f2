"""Arrays of zeros whose memory is taken when it is first written to."""

from __future__ import annotations

import functools
from typing import Any

import jax

from ksana_jax.native.target import target


@functools.partial(jax.jit, static_argnums=(0, 1))
def lazy_zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros as `jnp.zeros` does. Untouched pages take no memory, where the allocator's memory permits it."""
    return jax.ffi.ffi_call(target("ksana_zeros"), jax.ShapeDtypeStruct(shape, dtype))()
