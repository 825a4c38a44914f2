"""The operations that steps are made of, each alone on the device and compared with NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.devices.features import THREEFRY_WORDS, rbg_bits, threefry

_X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
_AT = np.array([3, 1, 7], np.int32)


def _scattered() -> np.ndarray:
    found = _X.copy()
    found[[3, 1]] = 1
    return found


def _normal_bf16() -> Any:
    return jnp.asarray(_X, jnp.bfloat16)


# Operation: function under jit, its arguments, and its expected result.
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Callable[[], Any]]] = {
    "gather": (lambda x, at: x[at], (_X, _AT), lambda: _X[_AT]),
    "scatter, dropping what is beyond the end": (
        lambda x, at: x.at[at].set(1.0, mode="drop"),
        (_X, np.array([3, 1, 99], np.int32)),
        _scattered,
    ),
    "dynamic_slice": (
        lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 2),
        (_X, np.int32(4)),
        lambda: _X[4:6],
    ),
    "loop of constant length": (
        lambda x: jax.lax.fori_loop(0, 5, lambda i, total: total + x[i], jnp.zeros(64)),
        (_X,),
        lambda: _X[:5].sum(axis=0),
    ),
    "loop of dynamic length": (
        lambda n: jax.lax.while_loop(lambda i: i * i < n, lambda i: i + 1, jnp.int32(0)),
        (np.int32(1000),),
        lambda: 32,
    ),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 9, lambda: x, lambda: -x), (_X,), lambda: -_X),
    "sort": (lambda x: jnp.sort(x, axis=-1), (_X,), lambda: np.sort(_X, axis=-1)),
    "argsort, stable": (
        lambda x: jnp.argsort(x > 0, axis=-1),
        (_X,),
        lambda: np.argsort(_X > 0, kind="stable", axis=-1),
    ),
    "top_k": (lambda x: jax.lax.top_k(x, 5)[0], (_X,), lambda: -np.sort(-_X, axis=-1)[:, :5]),
    "cumsum": (lambda x: jnp.cumsum(x, axis=-1), (_X,), lambda: np.cumsum(_X, axis=-1)),
    "argmax, the first of equals": (lambda x: jnp.argmax(x > 0, axis=-1), (_X,), lambda: np.argmax(_X > 0, axis=-1)),
    "is_finite": (jnp.isfinite, (np.array([1, np.inf, np.nan], np.float32),), lambda: [True, False, False]),
    "remainder and bits": (
        lambda n: (n % 7) ^ (n >> 3) & 5,
        (np.arange(50, dtype=np.int32),),
        lambda: (np.arange(50) % 7) ^ (np.arange(50) >> 3) & 5,
    ),
    "bitcast of bfloat16": (
        lambda x: jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint16), jnp.bfloat16),
        (_normal_bf16,),
        _normal_bf16,
    ),
    "threefry's bits": (threefry, (THREEFRY_WORDS[0],), lambda: THREEFRY_WORDS[1]),
    "bits of the device's own generator (rbg)": (
        lambda words: rbg_bits(words).astype(jnp.float32) * 0,
        (THREEFRY_WORDS[0],),
        lambda: np.zeros(8),
    ),
    "product in float32": (
        functools.partial(jnp.matmul, precision="highest"),
        (_X, _X.T),
        lambda: _X.astype(np.float64) @ _X.T,
    ),
    "product in bfloat16, summed in float32": (
        lambda x: jnp.matmul(x, x.T, preferred_element_type=jnp.float32),
        (_normal_bf16,),
        lambda: np.asarray(_normal_bf16(), np.float64) @ np.asarray(_normal_bf16(), np.float64).T,
    ),
}

# The engine's fallback where an operation is missing.
WITHOUT = {
    "loop of dynamic length": "attention has loops of constant length",
    "cond": "sampling computes both branches",
    "threefry's bits": "sampling takes the device's own generator (rbg)",
    "bits of the device's own generator (rbg)": "the engine needs it only without threefry",
}


def error_of(name: str) -> str:
    """Runs an operation; returns its largest error.

    Raises:
      AssertionError: the result is wrong.
    """
    function, arguments, expected = OPERATIONS[name]
    given = [argument() if callable(argument) else argument for argument in arguments]
    found = np.asarray(jax.jit(function)(*given)).astype(np.float64)
    wanted = np.asarray(expected()).astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    return f"largest error {np.max(np.abs(found - wanted)):.1g}"
