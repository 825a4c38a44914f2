"""Recurrent layers in C++, whose states are updated in their pool: the arithmetic of `models.recurrent`.

A text's tokens are computed one after the other in one order of operations, so that bits do not depend on how steps cut
it, nor on other texts. Each function returns the rows of a step, zeros for padding, and the pools, which it consumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.native.shapes import check_shape
from ksana_jax.native.target import DTYPES, STORED, target


class Texts(NamedTuple):
    """The texts of a step in a layer, int32: see `scheduler.step.per_token.StateArrays`.

    of_texts: [3, R]. of_tokens: [2, T]. layer: index in the pool, a scalar. A text continues the one
    before it if it reads the slot that the other one writes.
    """

    of_texts: jax.Array
    of_tokens: jax.Array
    layer: jax.Array

    def arguments(self, given: jax.Array) -> tuple[jax.Array, ...]:
        check_shape("of_texts", self.of_texts.shape[:1], (3,), "slots to read and to write, and last tokens")
        check_shape("of_tokens", self.of_tokens.shape, (2, len(given)), f"inputs are {list(given.shape)}")
        return self.of_texts, self.of_tokens, jnp.asarray(self.layer, jnp.int32).reshape(1)


def short_conv(
    x: jax.Array, gate: jax.Array, taps: jax.Array, bias: jax.Array | None, pool: jax.Array, texts: Texts
) -> tuple[jax.Array, jax.Array]:
    """Computes gate conv(x), see `ShortConvSpec`.

    Args:
      x, gate: [T, D]. taps: [D, 1, kernel]. bias: [D]. pool: [slots, layers, kernel - 1, D]; all of x's type.

    Raises:
      NotImplementedError: the type is neither float32 nor bfloat16. ValueError: shapes do not fit.
    """
    _check_types(x, gate=gate, taps=taps, pool=pool)
    d, reason = pool.shape[3], f"the pool is {list(pool.shape)}"
    check_shape("inputs", x.shape[1:], (d,), reason)
    check_shape("gates", gate.shape, x.shape, reason)
    check_shape("taps", taps.shape, (d, 1, pool.shape[2] + 1), reason)
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call(target("ksana_short_conv"), results, input_output_aliases={7: 1})
    y, pool = call(x, gate, taps, _bias(bias, d, x), *texts.arguments(x), pool, stored=np.int32(STORED[x.dtype.name]))
    return y, pool


class Heads(NamedTuple):
    """A step's terms of heads with a matrix, besides q, k and v.

    A state becomes S' = decay S, then S' + k u^T with u = beta v, or with `delta` beta (v - k^T S'); then q and k are
    divided by their norms, and q by the root of its length. S^T q, to which skip v is added, is normalised in equal
    groups and multiplied by the gate's SiLU or sigmoid, with gate_first before the norm.

    decay: [T, H, K], or [T, H, 1]. beta: [T, H]. gate: [T, H*V]. All are float32.
    norm: [V], or with gate_first [H*V], of the inputs' type. skip: float32 [H], with gate_first only; or None.
    """

    decay: jax.Array
    beta: jax.Array
    gate: jax.Array
    norm: jax.Array
    eps: float
    groups: int
    delta: bool
    skip: jax.Array | None = None
    gate_first: bool = False
    sigmoid: bool = False


def recur(
    given: jax.Array,
    taps: Sequence[jax.Array],
    bias: jax.Array | None,
    heads: Heads,
    pools: tuple[jax.Array, jax.Array],
    texts: Texts,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Convolves queries, keys and values, and passes them through the states of heads.

    Args:
      given: [T, C], C = 2*Hk*K + H*V. taps: of queries, keys and values, [., 1, kernel]. bias: [C].
      pools: [slots, layers, kernel - 1, C] of given's type, and float32 [slots, layers, H, K, V],
        or with an axis of 1 before H.

    Returns:
      [T, H*V], and the pools.

    Raises:
      NotImplementedError: the type is neither float32 nor bfloat16. ValueError: shapes do not fit.
    """
    inputs, matrices = pools
    _check_types(given, pool=inputs, norm=heads.norm, **dict(zip("qkv", taps, strict=True)))
    (_, _, past, c), (_, _, *ones, h, k, v), t = inputs.shape, matrices.shape, len(given)
    keys, reason = (c - h * v) // 2, f"the pools are {list(inputs.shape)} and {list(matrices.shape)}"
    if keys % k or keys <= 0 or h % (keys // k) or h % heads.groups or not (heads.groups == h or heads.gate_first):
        raise ValueError(f"{keys} channels of keys of {k}, {heads.groups} groups: {reason}")
    of_pool = *inputs.shape[:2], *[1] * len(ones), h, k, v
    wanted = {"inputs": (given, (t, 2 * keys + h * v)), "pools": (matrices, of_pool)}
    wanted |= {f"{x} taps": (w, (n, 1, past + 1)) for x, w, n in zip("qkv", taps, (keys, keys, h * v), strict=True)}
    wanted |= {"decay": (heads.decay, (t, h, heads.decay.shape[-1])), "beta": (heads.beta, (t, h))}
    wanted |= {"gate": (heads.gate, (t, h * v)), "the norm": (heads.norm, (h * v if heads.gate_first else v,))}
    if heads.decay.shape[-1] not in (1, k):
        raise ValueError(f"decay is {list(heads.decay.shape)}, must end with 1 or {k}: {reason}")
    if heads.skip is not None:
        wanted |= {"skip": (heads.skip, (h,))}
    for name, (array, shape) in wanted.items():
        check_shape(name, array.shape, shape, reason)
    array, wide = jax.ShapeDtypeStruct, jnp.float32
    results = array((t, h * v), given.dtype), array(inputs.shape, inputs.dtype), array(matrices.shape, wide)
    results += array((t, c), wide), array((t, h * v), wide)
    skip = jnp.zeros(0, wide) if heads.skip is None else heads.skip
    call = jax.ffi.ffi_call(target("ksana_recur"), results, input_output_aliases={13: 1, 14: 2})
    y, inputs, matrices, _, _ = call(
        *(given, *taps, _bias(bias, c, given), heads.decay, heads.beta, heads.gate, heads.norm, skip),
        *texts.arguments(given),
        *pools,
        stored=np.int32(STORED[given.dtype.name]),
        groups=np.int32(heads.groups),
        delta=np.bool_(heads.delta),
        gate_first=np.bool_(heads.gate_first),
        sigmoid=np.bool_(heads.sigmoid),
        eps=np.float32(heads.eps),
    )
    return y, (inputs, matrices)


def _check_types(given: jax.Array, **others: jax.Array) -> None:
    for name, array in {"inputs": given, **others}.items():
        if array.dtype != given.dtype or given.dtype.name not in DTYPES:
            names = " or ".join(DTYPES)
            raise NotImplementedError(f"{name} in {array.dtype}, inputs in {given.dtype}; both must be {names}")


def _bias(bias: jax.Array | None, num: int, given: jax.Array) -> jax.Array:
    if bias is None:
        return jnp.zeros(0, given.dtype)
    check_shape("the bias", bias.shape, (num,), f"inputs are {list(given.shape)}")
    return bias.astype(given.dtype)
