"""Custom calls of XLA into the compiled library."""

from __future__ import annotations

import ctypes
import functools

import jax

from ksana_jax.native.build import library

# Of activations: those in which products, norms and layers compute.
DTYPES = ("float32", "bfloat16")
# Numbers of `Stored` in numbers.h. A pool on a CPU holds bfloat16 as uint16: see `kv.layout.BITS`.
STORED = {"float32": 0, "bfloat16": 1, "uint16": 1, "float16": 2, "int8": 3}


@functools.cache
def target(symbol: str) -> str:
    """Makes a function of the library known to jax; returns the name of the custom call, which is that of this very
    library: programs that jax has kept on disk call no other.

    Raises:
      CannotBuild: the library cannot be compiled here.
    """
    path = library()
    name = f"{symbol}_{path.stem}"
    loaded = ctypes.cdll.LoadLibrary(str(path))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform="cpu")
    return name
