"""Calls an eviction method's `priority` once, on a few made-up tokens: mistakes show before an engine is built."""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import line_of, name_of, nearest
from ksana_jax.kv.eviction.base import Cached, EvictionMethod

# What a class needs for the fields of `Cached` that are None by default.
_ASKED_BY = {"scores": "observes = True", "text_positions": "needs_text_positions = True", "state": "state_shape"}
_ASKED_BY |= {"output_norms": "reads_outputs = True", "given": "given and needs_full_text = True"}


def check_priority(method: EvictionMethod) -> None:
    """Raises a ConfigError if `priority` reads what its class does not ask for, or returns no number for each token.

    Other errors are the compiled step's to raise: jax.numpy may do what NumPy cannot.
    """
    shape, read = (13, 3, 5, 12), {}  # rows, layers, KV heads, tokens

    class Watched(Cached):
        def __getattribute__(self, name: str) -> Any:
            if (value := super().__getattribute__(name)) is None:
                caller = sys._getframe(1)
                read[name] = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}"
            return value

    rng, count = np.random.default_rng(0), np.full(shape[0], shape[-1])
    keys, values = rng.normal(size=(2, *shape, 8)).astype(np.float32)
    cached = Watched(keys, values, None, None, count, count // 4, count, 0 * count, None, count // 2, 0 * count, count)
    positions = np.broadcast_to(np.arange(shape[-1]), shape)
    scores = (positions / 12).astype(np.float32)  # the first is 0, as weights are that underflow
    sums = method.num_scores(2)
    observed = scores if sums == 1 else np.repeat(scores[..., None], sums, axis=-1)
    given = {"scores": observed, "text_positions": positions, "given": scores}
    asked = {"scores": method.observes, "text_positions": method.needs_text_positions, "given": method.needs_full_text}
    fields: dict[str, Any] = {name: given[name] for name, wanted in asked.items() if wanted}
    if method.reads_outputs:
        fields["output_norms"] = np.abs(values).sum(axis=-1).repeat(2, axis=2)  # of 2 query heads for each KV head
    if (state := method.state_shape(2, 8)) is not None:
        fields["state"] = rng.random((*shape[:3], *state), np.float32)
    name, cached = f"kv_eviction {name_of(type(method))}: priority", cached._replace(**fields)
    taken = inspect.signature(method.priority)
    try:
        taken.bind(cached, np)
    except TypeError:
        code = inspect.unwrap(type(method).priority).__code__
        place = f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
        raise ConfigError(f"{name} takes {taken}, must take (self, cached, xp) ({place})") from None
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(method.priority(cached, np))
    except NotImplementedError:
        raise ConfigError(f"{name} is not defined by the class") from None
    except Exception as error:
        place = line_of(error, type(method).__module__)
        if isinstance(error, AttributeError) and error.obj is cached:
            close = nearest(str(error.name), Cached._fields, cutoff=0.0)
            raise ConfigError(f"{name} reads cached.{error.name}{place}; the nearest field is {close!r}") from None
        if f"{count.shape}" in str(error):
            hint = "cached.num_tokens and other numbers of rows need [:, None, None, None]"
            raise ConfigError(f"{name}{place}: {str(error).strip()}; {hint}") from None
        if not read or "NoneType" not in str(error):
            return
        found = np.asarray(None)
    if found.dtype == object and read:
        field, place = read.popitem()
        raise ConfigError(f"{name} reads cached.{field} ({place}), which is None: the class needs {_ASKED_BY[field]}")
    if found.dtype == object or found.shape not in itertools.product(
        shape[:1], (1, shape[1]), (1, shape[2]), shape[3:]
    ):
        wanted = f"must be {shape} (rows, layers, KV heads, tokens) for keys of {keys.shape}"
        raise ConfigError(f"{name} returns {f'shape {found.shape}' if found.shape else found}, {wanted}")
    if np.isnan(found[..., : -count[0] // 4]).any():
        raise ConfigError(
            f"{name} is NaN for some of the made-up tokens, such as 0 / 0 or 0 * log(0): they have no rank"
        )
