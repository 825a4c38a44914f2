"""Calls an eviction method's `priority` once, on a few made-up tokens: mistakes show before an engine is built."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import name_of, nearest
from ksana_jax.kv.eviction.base import Cached, EvictionMethod

# What a class needs for the fields of `Cached` that are None by default.
_ASKED_BY = {"scores": "observes = True", "text_positions": "needs_text_positions = True", "state": "state_shape"}
_ASKED_BY |= {"output_norms": "reads_outputs = True", "given": "given and needs_full_text = True"}


def check_priority(method: EvictionMethod) -> None:
    """Raises a ConfigError if `priority` reads what its class does not ask for, or returns no number for each token.

    Other errors are the compiled step's to raise: jax.numpy may do what NumPy cannot.
    """
    shape, read = (2, 3, 5, 12), {}  # rows, layers, KV heads, tokens

    class Watched(Cached):
        def __getattribute__(self, name: str) -> Any:
            if (value := super().__getattribute__(name)) is None:
                caller = sys._getframe(1)
                read[name] = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}"
            return value

    keys, ones, count = np.ones((*shape, 8), np.float32), np.ones(shape, np.float32), np.full(shape[0], shape[-1])
    cached = Watched(keys, keys, None, None, count, count // 4, count, 0 * count, None, count // 2, 0 * count, count)
    asked = {"scores": method.observes, "text_positions": method.needs_text_positions, "given": method.needs_full_text}
    fields: dict[str, Any] = {name: ones for name, wanted in asked.items() if wanted}
    if method.reads_outputs:
        fields["output_norms"] = ones.repeat(2, axis=2)  # of 2 query heads for each KV head
    if (state := method.state_shape(2, 8)) is not None:
        fields["state"] = np.ones((*shape[:3], *state), np.float32)
    name, cached = f"kv_eviction {name_of(type(method))}: priority", cached._replace(**fields)
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(method.priority(cached, np))
    except NotImplementedError:
        raise ConfigError(f"{name} is not defined by the class") from None
    except Exception as error:
        if isinstance(error, AttributeError) and error.obj is cached:
            frame = traceback.extract_tb(error.__traceback__)[-2]
            close = nearest(str(error.name), Cached._fields, cutoff=0.0)
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise ConfigError(f"{name} reads cached.{error.name} ({place}); the nearest field is {close!r}") from None
        if not read or "NoneType" not in str(error):
            return
        found = np.asarray(None)
    if found.dtype == object and read:
        field, place = read.popitem()
        raise ConfigError(f"{name} reads cached.{field} ({place}), which is None: the class needs {_ASKED_BY[field]}")
    fits = all(size in (1, other) for size, other in zip(found.shape[::-1], shape[::-1], strict=False))
    if found.dtype == object or found.ndim > len(shape) or not fits:
        wanted = f"must be {shape} (rows, layers, KV heads, tokens) for keys of {keys.shape}"
        raise ConfigError(f"{name} returns {f'shape {found.shape}' if found.shape else found}, {wanted}")
