"""Implementations of products with weights, in order of preference, and the choice among them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from ksana_jax.models import layers
from ksana_jax.models.layers import Linear

# For bfloat16 XLA uses matrix units (AMX), the native products do not; but XLA takes 20 times as long for one
# row as for eight.
FEW_ROWS = 8


class LinearImplementation(NamedTuple):
    """An implementation with the contract of `models.layers.linear`.

    unsupported: (platform, NumPy's name of the type of activations and weights) -> why it cannot serve, or None.
    """

    name: str
    apply: Linear
    unsupported: Callable[[str, str], str | None]


def _native(x: jax.Array, w: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    from ksana_jax.native.linear import linear

    rows = x.size // x.shape[-1]
    if x.dtype.name == "bfloat16" and rows >= FEW_ROWS and "amx_bf16" in _cpu_features():
        linear = layers.linear
    return linear(x, w, b, dtype=dtype)


@functools.cache
def _cpu_features() -> frozenset[str]:
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def _not_native(platform: str, dtype: str) -> str | None:
    if platform != "cpu":
        return f"needs a CPU, this is {platform}"
    if "avx512f" not in _cpu_features():
        return "needs a CPU with AVX-512, for which its tiles are made"
    from ksana_jax.native.build import CannotBuild, library
    from ksana_jax.native.linear import DTYPES

    if dtype not in DTYPES:
        return f"activations are {dtype}; native products have {' or '.join(DTYPES)}"
    try:
        library()
    except CannotBuild as reason:
        return str(reason)
    return None


# In order of preference; the last one runs everywhere.
LINEAR_IMPLEMENTATIONS = (
    LinearImplementation("native", _native, _not_native),
    LinearImplementation("xla", layers.linear, lambda platform, dtype: None),
)


def choose_linear(platform: str, dtype: str, name: str = "auto") -> LinearImplementation:
    """Returns the first implementation that serves a platform and a type, or the one with the given name.

    Raises:
      ValueError: there is none of that name, or it does not serve.
    """
    if name == "auto":
        return next(i for i in LINEAR_IMPLEMENTATIONS if i.unsupported(platform, dtype) is None)
    for i in LINEAR_IMPLEMENTATIONS:
        if i.name == name:
            if reason := i.unsupported(platform, dtype):
                raise ValueError(f"linear_implementation {name!r}: {reason}")
            return i
    names = ", ".join(i.name for i in LINEAR_IMPLEMENTATIONS)
    raise ValueError(f"linear_implementation is {name!r}, must be auto or one of {names}")
