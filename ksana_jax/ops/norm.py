"""Implementations of norms, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.core.operator_settings import first_serving
from ksana_jax.models import layers
from ksana_jax.models.layers import NORMS, Normalise
from ksana_jax.native.callers import why_not_called
from ksana_jax.native.target import DTYPES, register_targets
from ksana_jax.ops import native_operators


def not_native(platform: str, dtype: str, kinds: tuple[str, ...]) -> str | None:
    """Returns why native norms cannot serve a platform, NumPy's name of a type and kinds of norms, or None.

    They take 0.2 to 0.5 of the time of XLA's for up to 32 rows, and 0.4 to 1.7 of it for 512 (rows of 64 to 1,000, both
    types, two busy cores of Zen 4, jax 0.10.2).
    """
    native = native_kinds()
    if unknown := [kind for kind in kinds if kind not in native]:
        return f"norms are {', '.join(unknown)}; native norms are {' or '.join(native)}"
    if dtype not in DTYPES:
        return f"activations are {dtype}; native norms have {' or '.join(DTYPES)}"
    return why_not_called(platform)


def native_kinds() -> list[str]:
    """Returns the kinds of norms that C++ has."""
    return [kind for kind, norm in NORMS.items() if norm.plus_one is not None or norm.apply is layers.layer_norm]


class NormImplementation(NamedTuple):
    """An implementation of norms.

    load: returns the function that gives the norm of a `NormSpec`, as `layers.normaliser` does.
    unsupported: (platform, NumPy's name of the type of activations, kinds of norms) -> why it cannot serve, or None.
    needs: hardware and software that it runs on, for readers.
    """

    name: str
    load: Callable[[], Callable[[NormSpec], Normalise]]
    unsupported: Callable[[str, str, tuple[str, ...]], str | None]
    needs: str = ""


def choose_norm(platform: str, dtype: str, kinds: tuple[str, ...], name: str = "auto") -> NormImplementation:
    """Returns the first implementation that serves some kinds of norms, or the one with the given name.

    Raises:
      ValueError: there is none of that name, or it does not serve.
    """
    return first_serving("norm", name, NORM_IMPLEMENTATIONS, lambda i: i.unsupported(platform, dtype, kinds))


def kinds_of(config: ModelConfig) -> tuple[str, ...]:
    """Returns the kinds of norms that a model's layers have."""
    return tuple(dict.fromkeys(layer.norms.kind for layer in config.layers))


def _native() -> Callable[[NormSpec], Normalise]:
    register_targets()
    return native_operators.normaliser


# In order of preference; the last one runs everywhere.
NORM_IMPLEMENTATIONS = (
    NormImplementation("native", _native, not_native, "a CPU, and C++ of a wheel or a compiler"),
    NormImplementation("xla", lambda: layers.normaliser, lambda platform, dtype, kinds: None),
)
