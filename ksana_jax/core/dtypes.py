"""Dtypes of weights and KV: one internal spelling ("f32", "bf16", "int8"), and those that users write. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.errors import ConfigError

DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
DTYPES = tuple(DTYPE_BYTES)
# As vLLM, PyTorch and NumPy write them.
SPELLINGS = {"float32": "f32", "float": "f32", "bfloat16": "bf16", "float16": "f16", "half": "f16"}
KV_SPELLINGS = SPELLINGS | {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def canonical_dtype(given: Any, name: str = "dtype", also: tuple[str, ...] = ()) -> str:
    """Returns the internal spelling of a dtype.

    Args:
      given: "f32", "float32", "half", jnp.bfloat16, torch.float16, ...
      name: name of the setting, for the message.
      also: other values that the setting accepts; they are returned unchanged.

    Raises:
      ConfigError: weights and KV cannot have this dtype.
    """
    text = _name_of(given)
    text = SPELLINGS.get(text, text)
    if text not in (*DTYPES, *also):
        others = ", ".join(SPELLINGS)
        raise ConfigError(f"{name} is {given!r:.60}, must be one of {', '.join((*DTYPES, *also))} (or {others})")
    return text


def canonical_kv_dtype(given: Any) -> str | dict[str, Any]:
    """Returns the internal spelling of a KV dtype; other names, such as "auto", and mappings are returned unchanged."""
    if isinstance(given, Mapping):
        return dict(given)
    text = _name_of(given)
    return KV_SPELLINGS.get(text, text)


def _name_of(given: Any) -> str:
    text = given
    if not isinstance(given, str):
        text = getattr(given, "__name__", None) or getattr(given, "name", None) or str(given)
    return str(text).removeprefix("torch.")
