"""Building blocks of the network, as functions of arrays; matrices are [out, in], as in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.models.matrix import Matrix, dot, finished

# A function with the contract of `linear`.
Linear = Callable[..., jax.Array]
# normalise(x [..., D], weight [D], or [2, D] with a bias) -> [..., D].
Normalise = Callable[[jax.Array, jax.Array], jax.Array]


def linear(x: jax.Array, w: jax.Array | Matrix, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    """Multiplies x [..., in] by w [out, in], adds b [out]: [..., out] in dtype (x's by default), summed in float32."""
    return w.multiply(x, b, dtype=dtype) if isinstance(w, Matrix) else finished(dot(x, w), b, dtype or x.dtype)


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """Limits x to (-cap, cap) by cap * tanh(x / cap) (arXiv:2408.00118, section 2)."""
    return cap * jnp.tanh(x / cap)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, axis: str | None = None) -> jax.Array:
    """Divides x [..., D] by its root mean square, times weight [D]; computed in float32 (arXiv:1910.07467).

    axis: of devices that each hold an equal part of rows and weight; the root mean square is the whole row's.
    """
    return weight * _normalised(x, eps, axis).astype(x.dtype)


def rms_norm_plus_one(x: jax.Array, weight: jax.Array, eps: float, axis: str | None = None) -> jax.Array:
    """Like `rms_norm` with weight 1 + weight, applied before rounding to x's dtype (arXiv:2408.00118)."""
    return (_normalised(x, eps, axis) * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def _normalised(x: jax.Array, eps: float, axis: str | None) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    if axis is not None:
        mean = jax.lax.pmean(mean, axis)
    return x32 * jax.lax.rsqrt(mean + eps)


def layer_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Subtracts the mean of x [..., D] and divides by the standard deviation (arXiv:1607.06450), in float32.

    weight: factors [D]; or [2, D], factors and a bias.
    """
    x32, rows = x.astype(jnp.float32), jnp.atleast_2d(weight).astype(jnp.float32)
    out = _normalised(x32 - x32.mean(axis=-1, keepdims=True), eps, None) * rows[0]
    return (out + rows[1] if len(rows) > 1 else out).astype(x.dtype)


class Norm(NamedTuple):
    """A kind of norm, computed row by row, and the facts that settings depend on.

    apply: (x [..., D], weight, eps) -> [..., D]. identity: weight that leaves x unscaled.
    bias: whether the weight is [2, D], with a second row that is added; otherwise it is [D].
    plus_one: True if kernels add 1 to the weight of this root mean square norm; None for norms that kernels lack.
    row_by_row: for `numerics: invariant`, of a norm that kernels lack. apply consists of functions of single
      numbers: XLA orders a sum by the shape of the whole array.
    """

    apply: Callable[[jax.Array, jax.Array, float], jax.Array]
    identity: float
    plus_one: bool | None = None
    row_by_row: bool = False
    bias: bool = False


# Gemma stores weight - 1.
NORMS = {
    "rms": Norm(rms_norm, 1.0, plus_one=False),
    "rms_plus_one": Norm(rms_norm_plus_one, 0.0, plus_one=True),
    "layer": Norm(layer_norm, 1.0, bias=True),
    "layer_no_bias": Norm(layer_norm, 1.0),
}


def norm_kind(name: str) -> Norm:
    """Returns the kind of norm with this name.

    Raises:
      ConfigError: the name is unknown.
    """
    checks.require(checks.one_of("norm", name, NORMS), error=ConfigError)
    return NORMS[name]


def normaliser(spec: NormSpec) -> Normalise:
    """Returns the function that applies a layer's norms."""
    apply = jax.named_scope("norm")(norm_kind(spec.kind).apply)
    return lambda x, weight: apply(x, weight, spec.eps)
