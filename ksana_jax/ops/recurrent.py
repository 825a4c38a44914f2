"""Implementations of recurrent layers, in order of preference, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ksana_jax.core.operator_settings import first_serving
from ksana_jax.core.recurrent import RecurrentSpec
from ksana_jax.models.recurrent import StatesInPlace
from ksana_jax.native.callers import why_not_called
from ksana_jax.native.target import DTYPES, register_targets
from ksana_jax.ops.native_states import NativeStates


class RecurrentImplementation(NamedTuple):
    """An implementation of recurrent layers between their products with weights.

    load: returns the argument `in_place` of `ops.states.paged_recur`.
    unsupported: (platform, NumPy's name of the type of activations, a device's layers) -> why it cannot serve, or None.
    needs: hardware and software that it runs on, for readers.
    """

    name: str
    load: Callable[[], Callable[..., StatesInPlace] | None]
    unsupported: Callable[[str, str, RecurrentSpec], str | None]
    needs: str = ""


def _native() -> Callable[..., StatesInPlace]:
    register_targets()
    return NativeStates


def _not_native(platform: str, dtype: str, spec: RecurrentSpec) -> str | None:
    if getattr(spec, "norm_divided", False):
        return "devices divide the numbers that a norm of Mamba-2 adds up"
    if dtype not in DTYPES:
        return f"activations are {dtype}; native recurrent layers have {' or '.join(DTYPES)}"
    return why_not_called(platform)


# In order of preference; the last one runs everywhere.
RECURRENT_IMPLEMENTATIONS = (
    RecurrentImplementation("native", _native, _not_native, "a CPU, and C++ of a wheel or a compiler"),
    RecurrentImplementation("xla", lambda: None, lambda platform, dtype, spec: None),
)


def choose_recurrent(platform: str, dtype: str, spec: RecurrentSpec, name: str = "auto") -> Any:
    """Returns the first implementation that serves a platform, NumPy's name of a type and a device's layers, or the one
    with the given name.

    Raises:
      ValueError: there is none of that name, or it does not serve.
    """
    given = platform, dtype, spec
    return first_serving("recurrent", name, RECURRENT_IMPLEMENTATIONS, lambda i: i.unsupported(*given))
