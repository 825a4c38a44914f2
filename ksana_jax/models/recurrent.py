"""Recurrent layers: functions of a layer's input and its state, which return the output and the new state.

A step computes tokens of several texts, or parts of texts, packed one after the other. R of these have a state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.recurrent import DeltaRuleSpec, RecurrentSpec, ShortConvSpec
from ksana_jax.models.layers import Linear, rms_norm

# The state of one layer: arrays [R, ...] by name, see `ShortConvSpec.state`.
State = dict[str, jax.Array]


class TextTokens(NamedTuple):
    """The tokens [T] of a step by text.

    text: [T] index in [0, R) of each token's text; beyond R for padding.
    nth: [T] number of the text's tokens before it in the step. last: [R] index of each text's last token.
    """

    text: jax.Array
    nth: jax.Array
    last: jax.Array


# mix(x [T, D], state, tokens) -> (out [T, W], state): a recurrent layer between its norm and its output projection.
Mix = Callable[[jax.Array, State, TextTokens], tuple[jax.Array, State]]
# recur(layer, mix, x [..., D], carried) -> (out [..., W], carried): calls mix with the states of a layer.
Recur = Callable[[int, Mix, jax.Array, Any], tuple[jax.Array, Any]]


class Kind(NamedTuple):
    """A kind of recurrent layer.

    shapes: (d_model, spec) -> shapes of its weights, by field of `LayerParams`. mix: (p, spec, linear) -> `Mix`, from
      these weights.
    """

    shapes: Callable[[int, Any], dict[str, tuple[int, ...]]]
    mix: Callable[[Any, Any, Linear], Mix]


def short_conv_shapes(d_model: int, spec: ShortConvSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"w_in": (3 * d_model, d_model), "w_o": (d_model, d_model)}
    shapes |= {"w_conv": (d_model, 1, spec.kernel)}
    return shapes | ({"b_in": (3 * d_model,), "b_o": (d_model,), "b_conv": (d_model,)} if spec.bias else {})


def short_conv(p: Any, spec: ShortConvSpec, linear: Linear) -> Mix:
    """See `ShortConvSpec`."""

    def mix(x: jax.Array, state: State, tokens: TextTokens) -> tuple[jax.Array, State]:
        b, c, value = jnp.split(linear(x, p.w_in, p.b_in), 3, axis=-1)
        out, inputs = causal_conv(b * value, state["conv"], tokens, p.w_conv, p.b_conv)
        return c * out, {"conv": inputs}

    return mix


def causal_conv(
    x: jax.Array, before: jax.Array, tokens: TextTokens, weight: Any, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Convolves each channel of x [T, C] over a token and those before it in its text, in float32.

    Args:
      before: [R, K - 1, C] the values of x before the step, the newest last. weight: [C, 1, K]. bias: [C] or None.

    Returns:
      [T, C], and what `before` is after the step.
    """
    num_before = before.shape[1]

    def lagged(lag: int) -> jax.Array:
        at = jnp.clip(tokens.nth - lag + num_before, 0, num_before - 1)
        return jnp.where((tokens.nth >= lag)[:, None], jnp.roll(x, lag, axis=0), before[tokens.text, at])

    inputs = [x, *map(lagged, range(1, num_before + 1))]  # by lag
    taps = weight[:, 0].astype(jnp.float32)
    # One product after the other: XLA would order a sum by the shape of the whole array.
    products = [inputs[lag].astype(jnp.float32) * taps[:, num_before - lag] for lag in range(num_before, -1, -1)]
    out = functools.reduce(jnp.add, products)
    out = out if bias is None else out + bias.astype(jnp.float32)
    newest = jnp.stack([inputs[lag][tokens.last] for lag in range(num_before - 1, -1, -1)], axis=1)
    return out.astype(x.dtype), newest.astype(before.dtype)


def delta_rule_shapes(d_model: int, spec: DeltaRuleSpec) -> dict[str, tuple[int, ...]]:
    d, heads = d_model, spec.num_value_heads
    keys, values = spec.num_key_heads * spec.key_dim, heads * spec.value_dim
    shapes: dict[str, tuple[int, ...]] = {"w_q": (keys, d), "w_k": (keys, d), "w_v": (values, d), "w_o": (d, values)}
    shapes |= {f"w_conv_{part}": (size, 1, spec.kernel) for part, size in zip("qkv", (keys, keys, values), strict=True)}
    shapes |= {"w_decay": (heads, d), "w_beta": (heads, d)}
    shapes |= {"w_out_gate": (values, d), "log_decay": (heads,), "b_decay": (heads,)}
    return shapes | {"delta_norm": (spec.value_dim,)}


def delta_rule(p: Any, spec: DeltaRuleSpec, linear: Linear) -> Mix:
    """See `DeltaRuleSpec`.

    Tokens are computed one after the other, each by operations of the same shapes, so that a token's bits depend on its
    text alone, not on how steps cut it.
    """
    heads, each = spec.num_value_heads, spec.num_value_heads // spec.num_key_heads
    keys = spec.num_key_heads * spec.key_dim

    def mix(x: jax.Array, state: State, tokens: TextTokens) -> tuple[jax.Array, State]:
        parts = [w for w in (p.w_q, p.w_k, p.w_v, p.w_qkv) if w is not None]
        inputs = jnp.concatenate([linear(x, w) for w in parts], axis=-1)
        taps = jnp.concatenate([p.w_conv_q, p.w_conv_k, p.w_conv_v])
        convolved, last_inputs = causal_conv(inputs, state["conv"], tokens, taps, None)
        decay, beta = (linear(x, w).astype(jnp.float32) for w in (p.w_decay, p.w_beta))
        g = -jnp.exp(p.log_decay) * jax.nn.softplus(decay + p.b_decay)
        gate = linear(x, p.w_out_gate).astype(jnp.float32)

        def step(matrices: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            text, numbers, g, beta, gate = token
            q, k, v = jnp.split(jax.nn.silu(numbers.astype(jnp.float32)), (keys, 2 * keys))
            q, k = (jnp.repeat(_unit(y.reshape(-1, spec.key_dim)), each, axis=0) for y in (q, k))
            matrix = matrices[text] * jnp.exp(g)[:, None, None]
            error = v.reshape(heads, -1) - (matrix * k[:, :, None]).sum(axis=1)
            matrix += k[:, :, None] * (beta[:, None] * error)[:, None]
            out = (matrix * (q * spec.key_dim**-0.5)[:, :, None]).sum(axis=1)
            normed = rms_norm(out, p.delta_norm.astype(jnp.float32), spec.eps)
            return matrices.at[text].set(matrix, mode="drop"), normed.reshape(-1) * jax.nn.silu(gate)

        beta = spec.beta_factor * jax.nn.sigmoid(beta)
        matrices, out = jax.lax.scan(step, state["delta"], (tokens.text, convolved, g, beta, gate))
        return out.astype(x.dtype), {"conv": last_inputs, "delta": matrices}

    return mix


def _unit(x: jax.Array) -> jax.Array:
    """Divides vectors x [n, H] by their norms."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


KINDS: dict[type, Kind] = {
    ShortConvSpec: Kind(short_conv_shapes, short_conv),
    DeltaRuleSpec: Kind(delta_rule_shapes, delta_rule),
}


def recurrent_shapes(d_model: int, spec: RecurrentSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a recurrent layer's weights but those of norms and MLP, by field of LayerParams."""
    return KINDS[type(spec)].shapes(d_model, spec)


def mixer(p: Any, spec: RecurrentSpec, linear: Linear) -> Mix:
    """Returns the function of a recurrent layer with weights p."""
    return KINDS[type(spec)].mix(p, spec, linear)


def from_the_start(spec: RecurrentSpec) -> Recur:
    """Returns a `Recur` for whole texts x [..., T, D], whose states before them are zeros and are not kept."""

    def recur(layer: int, mix: Mix, x: jax.Array, carried: Any) -> tuple[jax.Array, Any]:
        length, num_texts = x.shape[-2], math.prod(x.shape[:-2])
        arrays = spec.state(x.shape[-1]).items()
        state = {name: jnp.zeros((num_texts, *shape), dtype or x.dtype) for name, (shape, dtype) in arrays}
        text, nth = jnp.divmod(jnp.arange(num_texts * length), length)
        tokens = TextTokens(text, nth, jnp.arange(1, num_texts + 1) * length - 1)
        out, _ = mix(x.reshape(-1, x.shape[-1]), state, tokens)
        return out.reshape(*x.shape[:-1], -1), carried

    return recur
