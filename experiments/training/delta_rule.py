"""Gated delta rules of whole texts in chunks, for training: products of matrices instead of a loop over tokens.

It computes the same as `models.recurrent.from_the_start`, whose loop keeps the state of each token for the backward
pass. Source: arXiv:2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.models.layers import rms_norm
from ksana_jax.models.recurrent import Mix, OfInputs, State, StatesInPlace, Terms, causal_conv
from ksana_jax.models.text_tokens import TextTokens

CHUNK = 32


class _FromTheStart(StatesInPlace):
    """States of a text that are zeros before it and are not kept."""

    def short_conv(self, inputs: State, gate: jax.Array | None, p: Any) -> tuple[jax.Array, State]:
        raise NotImplementedError("training has no short convolutions")

    def matrices(
        self, inputs: State, gate: jax.Array | None, p: Any, spec: Any, bias: jax.Array | None, terms: OfInputs
    ) -> tuple[jax.Array, State]:
        x, taps = inputs["conv"], jnp.concatenate([p.w_conv_q, p.w_conv_k, p.w_conv_v])
        length, nth = len(x), jnp.arange(len(x))
        before, tokens = jnp.zeros((1, spec.kernel - 1, x.shape[1]), x.dtype), TextTokens(0 * nth, nth, nth[-1:])
        convolved, _ = causal_conv(x, before, tokens, taps, bias)
        out = chunked(jax.vmap(terms)(convolved, inputs["decay"], inputs["beta"]))
        assert gate is not None
        normed = rms_norm(out, p.delta_norm.astype(jnp.float32), spec.eps)
        return (normed.reshape(length, -1) * jax.nn.silu(gate)).astype(x.dtype), {}


def chunked(terms: Terms, size: int = CHUNK) -> jax.Array:
    """Returns what queries read of states that are zeros before the first token, [T, H, V], in float32.

    terms: of T tokens, with one decay per head. size: of a chunk; the last one is padded.
    """
    length = len(terms.q)

    def of_chunks(x: Any) -> jax.Array:  # [chunks, H, C, ...]; a token of zeros leaves a state unchanged
        padded = jnp.pad(x, [(0, -length % size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, size, *x.shape[1:]).swapaxes(1, 2)

    q, k, v, g, beta = map(of_chunks, terms)
    reached = jnp.tri(size, dtype=bool)
    g = g[..., 0] @ reached.T.astype(g.dtype)  # sums up to each token
    decay = jnp.exp(jnp.where(reached, g[..., :, None] - g[..., None, :], -jnp.inf))
    # (1 + strict lower part of rows) u = beta (v - e^g k S), as each u depends on those before it.
    rows = jnp.tril(decay * _dot(k, k) * beta[..., None], -1)
    given = beta[..., None] * jnp.concatenate([v, jnp.exp(g)[..., None] * k], axis=-1)
    u, of_state = jnp.split(_inverse_of_one_plus(rows) @ given, [v.shape[-1]], axis=-1)
    read, q = decay * _dot(q, k), jnp.exp(g)[..., None] * q
    end = g[..., -1:]
    k = jnp.exp(end - g)[..., None] * k

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        u, of_state, read, q, k, end = chunk
        u = u - of_state @ state
        return jnp.exp(end)[..., None] * state + jnp.swapaxes(k, 1, 2) @ u, q @ state + read @ u

    first = jnp.zeros((q.shape[1], q.shape[-1], v.shape[-1]))
    _, out = jax.lax.scan(step, first, (u, of_state, read, q, k, end))
    return jnp.swapaxes(out, 1, 2).reshape(-1, *out.shape[1::2])[:length]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ jnp.swapaxes(b, -1, -2)


def _inverse_of_one_plus(rows: jax.Array) -> jax.Array:
    """Inverts 1 + rows [..., C, C], which are strictly lower triangular; C is a power of 2."""
    size, given = rows.shape[-1], rows
    at, one = jnp.arange(size), jnp.eye(size)
    rows, inverse = jax.lax.stop_gradient(rows), jnp.broadcast_to(one, rows.shape)
    for width in (2**n for n in range(size.bit_length() - 1)):  # blocks of this width on the diagonal are inverted
        blocks = at // width
        below = (blocks[:, None] == blocks + 1) & (blocks % 2 == 0)
        inverse -= inverse @ jnp.where(below, rows, 0) @ inverse
    # A step of Newton's method, which has the gradient of the inverse.
    return inverse + inverse @ (one - inverse - given @ inverse)


def recur_in_chunks(layer: int, mix: Mix, x: jax.Array, carried: Any) -> tuple[jax.Array, Any]:
    """The `Recur` of gated delta rules on whole texts x [batch, T, D]."""
    batch, length, width = x.shape
    inputs, gate = jax.tree.map(lambda y: y.reshape(batch, length, -1), mix.project(x.reshape(-1, width)))
    nth = jnp.arange(length)
    tokens = TextTokens(jnp.zeros_like(nth), nth, nth[-1:])
    advance: Any = mix.advance  # with a gate, it returns an array
    return jax.vmap(lambda *text: advance(*text, _FromTheStart(), tokens)[0])(inputs, gate), carried
