"""Recurrent layers: functions of a layer's input and its state, which return the output and the new state.

A step computes tokens of several texts, or parts of texts, packed one after the other. R of these have a state.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.core.patterns import FAR
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from ksana_jax.models.layers import Linear, rms_norm
from ksana_jax.models.text_tokens import TextTokens

# The state of one layer: arrays [R, ...] by name, see `ShortConvSpec.state`.
State = dict[str, jax.Array]


class StatesInPlace(ABC):
    """States of a layer in the pool that has them, which operators of a device read and write there.

    Each method computes what `Mix.advance` does, [T, W], and returns the pool's arrays with it.
    """

    @abstractmethod
    def short_conv(self, inputs: State, gate: jax.Array | None, p: Any) -> tuple[jax.Array, State]:
        """Advances short convolutions."""

    @abstractmethod
    def matrices(
        self, inputs: State, gate: jax.Array | None, p: Any, spec: Any, bias: jax.Array | None, terms: OfInputs
    ) -> tuple[jax.Array, State]:
        """Advances states with a matrix per head. bias, terms: see `mix_matrices`."""


class Mix(NamedTuple):
    """A recurrent layer between its norm and its output projection, in two parts.

    project: x [T, D] -> (inputs, gate): what the state and the results depend on, arrays [T, ...] by name, see
      `ShortConvSpec.inputs`; and the gate of the results.
    advance: (inputs, gate, state, tokens) -> (out [T, W], state); without a gate, the state alone and None.
    """

    project: Callable[[jax.Array], tuple[State, jax.Array]]
    advance: Callable[[State, jax.Array | None, Any, TextTokens], tuple[jax.Array | None, State]]


# recur(layer, mix, x [..., D], carried) -> (out [..., W], carried): calls mix with the states of a layer.
Recur = Callable[[int, Mix, jax.Array, Any], tuple[jax.Array, Any]]
# Normalises rows x [..., W] of all heads, see `Operators.normed_projection`.
NormedHeads = Callable[[jax.Array, jax.Array, NormSpec], jax.Array]


class Kind(NamedTuple):
    """A kind of recurrent layer.

    shapes: (d_model, spec) -> shapes of its weights, by field of `LayerParams`. mix: arguments of `mixer` -> `Mix`.
    """

    shapes: Callable[[int, Any], dict[str, tuple[int, ...]]]
    mix: Callable[[Any, Any, Linear, NormedHeads], Mix]


def short_conv_shapes(d_model: int, spec: ShortConvSpec) -> dict[str, tuple[int, ...]]:
    width = spec.width or d_model
    shapes: dict[str, tuple[int, ...]] = {f"w_in_{part}": (width, d_model) for part in "bcx"}
    shapes |= {"w_o": (d_model, width), "w_conv": (width, 1, spec.kernel)}
    biases = {"b_o": (d_model,), "b_conv": (width,)} | {f"b_in_{part}": (width,) for part in "bcx"}
    return shapes | (biases if spec.bias else {})


def short_conv(p: Any, spec: ShortConvSpec, linear: Linear, normed_heads: NormedHeads) -> Mix:
    """See `ShortConvSpec`."""

    def project(x: jax.Array) -> tuple[State, jax.Array]:
        if p.w_in is None:
            parts = (p.w_in_b, p.b_in_b), (p.w_in_c, p.b_in_c), (p.w_in_x, p.b_in_x)
            b, c, value = (linear(x, w, bias) for w, bias in parts)
        else:
            b, c, value = jnp.split(linear(x, p.w_in, p.b_in), 3, axis=-1)
        return {"conv": b * value}, c

    def advance(inputs: State, gate: jax.Array | None, state: State | StatesInPlace, tokens: TextTokens):
        if isinstance(state, StatesInPlace):
            return state.short_conv(inputs, gate, p)
        out, newest = causal_conv(inputs["conv"], state["conv"], tokens, p.w_conv, p.b_conv)
        return None if gate is None else gate * out, {"conv": newest}

    return Mix(project, advance)


def causal_conv(
    x: jax.Array, before: jax.Array, tokens: TextTokens, weight: Any, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Convolves each channel of x [T, C] over a token and those before it in its text, in float32.

    Args:
      before: [R, K - 1, C] the values of x before the step, the newest last. weight: [C, 1, K]. bias: [C] or None.

    Returns:
      [T, C], and what `before` is after the step.
    """
    num_before, (begins, nth) = before.shape[1], tokens.chunks
    before = before if tokens.continues is None else before[begins]

    def lagged(lag: int) -> jax.Array:
        at = jnp.clip(nth - lag + num_before, 0, num_before - 1)
        return jnp.where((nth >= lag)[:, None], jnp.roll(x, lag, axis=0), before[tokens.text, at])

    inputs = [x, *map(lagged, range(1, num_before + 1))]  # by lag
    taps = weight[:, 0].astype(jnp.float32)
    # One product after the other: XLA would order a sum by the shape of the whole array.
    products = [inputs[lag].astype(jnp.float32) * taps[:, num_before - lag] for lag in range(num_before, -1, -1)]
    out = functools.reduce(jnp.add, products)
    out = out if bias is None else out + bias.astype(jnp.float32)
    newest = jnp.stack([inputs[lag][tokens.last] for lag in range(num_before - 1, -1, -1)], axis=1)
    return out.astype(x.dtype), newest.astype(before.dtype)


def matrix_shapes(d_model: int, spec: DeltaRuleSpec | Mamba2Spec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that kinds with a matrix per head share."""
    d, heads = d_model, spec.num_value_heads
    keys, values = spec.num_key_heads * spec.key_dim, heads * spec.value_dim
    shapes: dict[str, tuple[int, ...]] = {"w_q": (keys, d), "w_k": (keys, d), "w_v": (values, d), "w_o": (d, values)}
    shapes |= {f"w_conv_{part}": (size, 1, spec.kernel) for part, size in zip("qkv", (keys, keys, values), strict=True)}
    return shapes | {"w_decay": (heads, d), "w_out_gate": (values, d), "log_decay": (heads,), "b_decay": (heads,)}


def delta_rule_shapes(d_model: int, spec: DeltaRuleSpec) -> dict[str, tuple[int, ...]]:
    heads, r = spec.num_value_heads, spec.rank
    shapes = matrix_shapes(d_model, spec) | {"w_beta": (heads, d_model), "delta_norm": (spec.value_dim,)}
    if r is None:
        return shapes
    channels, values = heads * spec.key_dim, heads * spec.value_dim
    shapes |= {
        "w_decay_a": (r, d_model),
        "w_decay": (channels, r),
        "b_decay": (channels,),
    }
    return shapes | {"w_out_gate_a": (r, d_model), "w_out_gate": (values, r)}


def mamba2_shapes(d_model: int, spec: Mamba2Spec) -> dict[str, tuple[int, ...]]:
    shapes = matrix_shapes(d_model, spec) | {"skip": (spec.num_value_heads,)}
    shapes |= {"mamba_norm": (spec.num_value_heads * spec.value_dim,)}
    return shapes | ({f"b_conv_{part}": shapes[f"w_conv_{part}"][:1] for part in "qkv"} if spec.bias else {})


class Terms(NamedTuple):
    """The terms of a token in layers with a matrix per head, float32.

    A head's state S [K, V] becomes S' = e^g S, then S' + k u^T, of which q reads S^T q; u is v, or with a delta rule
    beta (v - k^T S'). q, k: [H, K]. v: [H, V]. g: [H, 1], or [H, K] for a decay of each row. beta: [H]; None without a
    delta rule.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array | None


# terms(convolved q, k and v of a token [C], decay [Hv] or [Hv*K], beta [Hv] or None) -> Terms.
# result(out [H, V], convolved, gate [W]) -> [W].
OfInputs = Callable[..., Terms]
Result = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def token_by_token(
    matrices: jax.Array, texts: Any, inputs: Any, gate: jax.Array | None, terms: OfInputs, result: Result
) -> tuple[jax.Array | None, jax.Array]:
    """Computes tokens one after the other, each by operations of the same shapes, so that a token's bits depend on its
    text alone, not on how steps cut it.

    Args:
      matrices: [R, H, K, V] states before the step, float32. texts: text and reads of `TextTokens`.
      inputs: of terms, arrays [T, ...].
      gate: [T, W] or None.

    Returns:
      [T, W], None without a gate; and the states after the step.
    """

    def step(matrices: jax.Array, token: Any) -> tuple[jax.Array, jax.Array | None]:
        (text, read), given, gate = token
        matrix, out = _advanced(matrices[read], terms(*given))
        out = None if gate is None else result(out, given[0], gate)
        return matrices.at[text].set(matrix, mode="drop"), out

    matrices, rows = jax.lax.scan(step, matrices, (texts, inputs, gate))
    return rows, matrices


def _advanced(matrix: jax.Array, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """Returns a state [H, K, V] after a token, and what the token's query reads of it, [H, V]."""
    q, k, v, g, beta = terms
    matrix = matrix * jnp.exp(g)[:, :, None]
    if beta is not None:
        v = beta[:, None] * (v - (matrix * k[:, :, None]).sum(axis=1))
    matrix += k[:, :, None] * v[:, None]
    return matrix, (matrix * q[:, :, None]).sum(axis=1)


def together(
    matrices: jax.Array,
    texts: Any,
    inputs: Any,
    gate: jax.Array | None,
    terms: OfInputs,
    result: Result,
    num_alone: int,
) -> tuple[jax.Array | None, jax.Array]:
    """Computes what `token_by_token` does with fewer operations: those of states for the first num_alone tokens, see
    `TextTokens`, in one, and all others once for all tokens. XLA may round differently for other numbers of tokens.
    """
    given = jax.vmap(terms)(*inputs)
    first, rest = (jax.tree.map(lambda x, at=at: x[at], given) for at in (slice(num_alone), slice(num_alone, None)))
    before, is_own = matrices[:num_alone], (texts[0][:num_alone] == jnp.arange(num_alone))[:, None, None, None]
    after, outs = jax.vmap(_advanced)(before, first)
    matrices = matrices.at[:num_alone].set(jnp.where(is_own, after, before))
    if num_alone < len(texts[0]):
        texts, kept = jax.tree.map(lambda x: x[num_alone:], (texts, gate))
        more, matrices = token_by_token(matrices, texts, rest, kept, Terms, lambda out, *_: out)
        outs = outs if more is None else jnp.concatenate([outs, more])
    return None if gate is None else jax.vmap(result)(outs, inputs[0], gate), matrices


def mix_matrices(
    p: Any,
    spec: DeltaRuleSpec | Mamba2Spec,
    linear: Linear,
    terms: OfInputs,
    result: Result,
    finish: Callable[[jax.Array], jax.Array] | None = None,
) -> Mix:
    """Returns a layer with a matrix per head. Terms and result get convolved q, k and v in the model's type; decay,
    beta and gate before their functions, in float32. finish: changes the results [T, W] of all tokens together."""

    def product(x: jax.Array, narrow: Any, w: Any) -> jax.Array:
        return linear(x if narrow is None else linear(x, narrow), w)

    def project(x: jax.Array) -> tuple[State, jax.Array]:
        parts = [w for w in (p.w_q, p.w_k, p.w_v, p.w_qkv) if w is not None]
        inputs = {"conv": jnp.concatenate([linear(x, w) for w in parts], axis=-1)}
        for name, a, w in (("decay", p.w_decay_a, p.w_decay), ("beta", None, p.w_beta)):
            inputs |= {} if w is None else {name: product(x, a, w).astype(jnp.float32)}
        return inputs, product(x, p.w_out_gate_a, p.w_out_gate)

    def advance(inputs: State, gate: jax.Array | None, state: State | StatesInPlace, tokens: TextTokens):
        taps = jnp.concatenate([p.w_conv_q, p.w_conv_k, p.w_conv_v])
        bias = None if p.b_conv_q is None else jnp.concatenate([p.b_conv_q, p.b_conv_k, p.b_conv_v])
        gate = None if gate is None else gate.astype(jnp.float32)
        if isinstance(state, StatesInPlace):
            return state.matrices(inputs, gate, p, spec, bias, terms)
        if (count := len(tokens.text)) == 1:  # XLA would compile no loop, and round otherwise: add a token of no text
            inputs, gate, nth = jax.tree.map(
                lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1)), (inputs, gate, tokens.nth)
            )
            tokens = tokens._replace(text=jnp.pad(tokens.text, (0, 1), constant_values=FAR), nth=nth)
        convolved, newest = causal_conv(inputs["conv"], state["conv"], tokens, taps, bias)
        given = convolved, inputs["decay"], inputs.get("beta")
        arguments = state["matrix"][:, 0], (tokens.text, tokens.reads), given, gate
        in_turn = functools.partial(token_by_token, terms=terms, result=result)
        if tokens.num_alone is None:
            out, matrix = in_turn(*arguments)
        else:  # a loop launches kernels for each token
            at_once = functools.partial(together, terms=terms, result=result, num_alone=tokens.num_alone)
            out, matrix = jax.lax.platform_dependent(*arguments, cpu=in_turn, default=at_once)
        out = out if out is None or finish is None else finish(out)
        return out if out is None else out[:count].astype(convolved.dtype), {"conv": newest, "matrix": matrix[:, None]}

    return Mix(project, advance)


def _queries_keys_values(numbers: jax.Array, spec: DeltaRuleSpec | Mamba2Spec) -> list[jax.Array]:
    """Splits convolved numbers [C] into q and k [Hk, K], and v [Hv, V], in float32."""
    keys, heads = spec.num_key_heads * spec.key_dim, (spec.num_key_heads, spec.num_key_heads, spec.num_value_heads)
    parts = jnp.split(jax.nn.silu(numbers.astype(jnp.float32)), (keys, 2 * keys))
    return [x.reshape(n, -1) for x, n in zip(parts, heads, strict=True)]


def _to_values(x: jax.Array, spec: DeltaRuleSpec | Mamba2Spec) -> jax.Array:
    """Repeats heads of queries or keys [Hk, K] for the values that they serve."""
    return jnp.repeat(x, spec.num_value_heads // spec.num_key_heads, axis=0)


def delta_rule(p: Any, spec: DeltaRuleSpec, linear: Linear, normed_heads: NormedHeads) -> Mix:
    """See `DeltaRuleSpec`."""

    def terms(numbers: jax.Array, decay: jax.Array, beta: jax.Array) -> Terms:
        q, k, v = _queries_keys_values(numbers, spec)
        q, k = (_to_values(_unit(x), spec) for x in (q, k))
        steps = jax.nn.softplus(decay + p.b_decay).reshape(spec.num_value_heads, -1)
        g = -jnp.exp(p.log_decay).reshape(-1, 1) * steps
        return Terms(q * spec.key_dim**-0.5, k, v, g, spec.beta_factor * jax.nn.sigmoid(beta))

    def result(out: jax.Array, numbers: jax.Array, gate: jax.Array) -> jax.Array:
        normed = rms_norm(out, p.delta_norm.astype(jnp.float32), spec.eps)
        return normed.reshape(-1) * (jax.nn.silu if spec.rank is None else jax.nn.sigmoid)(gate)

    return mix_matrices(p, spec, linear, terms, result)


def mamba2(p: Any, spec: Mamba2Spec, linear: Linear, normed_heads: NormedHeads) -> Mix:
    """See `Mamba2Spec`."""

    def terms(numbers: jax.Array, decay: jax.Array, beta: None) -> Terms:
        q, k, v = _queries_keys_values(numbers, spec)
        dt = jax.nn.softplus(decay + p.b_decay)[:, None]
        return Terms(_to_values(q, spec), _to_values(k, spec), v * dt, -jnp.exp(p.log_decay)[:, None] * dt, None)

    def gated(out: jax.Array, numbers: jax.Array, gate: jax.Array) -> jax.Array:
        out = out + p.skip[:, None] * _queries_keys_values(numbers, spec)[2]
        return out.reshape(-1) * jax.nn.silu(gate)

    def normed(x: jax.Array) -> jax.Array:
        groups = x.reshape(spec.num_key_heads, -1)
        return rms_norm(groups, weight.reshape(groups.shape), spec.eps).reshape(-1)

    weight, norms = p.mamba_norm.astype(jnp.float32), NormSpec("rms", spec.eps, "before")
    if spec.norm_divided:  # devices add up the squares of all tokens together, not token by token
        return mix_matrices(p, spec, linear, terms, gated, lambda x: normed_heads(x, weight, norms))
    return mix_matrices(p, spec, linear, terms, lambda *given: normed(gated(*given)))


def _unit(x: jax.Array) -> jax.Array:
    """Divides vectors x [n, H] by their norms."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


KINDS: dict[type, Kind] = {
    ShortConvSpec: Kind(short_conv_shapes, short_conv),
    DeltaRuleSpec: Kind(delta_rule_shapes, delta_rule),
    Mamba2Spec: Kind(mamba2_shapes, mamba2),
}


def recurrent_shapes(d_model: int, spec: RecurrentSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a recurrent layer's weights but those of norms and MLP, by field of LayerParams."""
    return KINDS[type(spec)].shapes(d_model, spec)


def mixer(p: Any, spec: RecurrentSpec, linear: Linear, normed_heads: Any = None) -> Mix:
    """Returns the function of a recurrent layer with weights p.

    normed_heads: of heads that devices divide; states need none.
    """
    return KINDS[type(spec)].mix(p, spec, linear, normed_heads)


def from_the_start(spec: RecurrentSpec) -> Recur:
    """Returns a `Recur` for whole texts x [..., T, D], whose states before them are zeros and are not kept."""

    def recur(layer: int, mix: Mix, x: jax.Array, carried: Any) -> tuple[jax.Array, Any]:
        length, width = x.shape[-2:]
        arrays = spec.state(width).items()
        state = {name: jnp.zeros((1, *shape), dtype or x.dtype) for name, (shape, dtype) in arrays}
        nth = jnp.arange(length)
        tokens = TextTokens(jnp.zeros_like(nth), nth, nth[-1:])
        # Texts side by side: a token of each in one operation.
        out = jax.vmap(lambda text: mix.advance(*mix.project(text), state, tokens)[0])(x.reshape(-1, length, width))
        assert out is not None
        return out.reshape(*x.shape[:-1], -1), carried

    return recur
