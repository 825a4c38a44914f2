"""States of recurrent layers that C++ updates in their pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.recurrent import Mamba2Spec
from ksana_jax.models.recurrent import OfInputs, State, StatesInPlace
from ksana_jax.models.text_tokens import TextTokens
from ksana_jax.native.recurrent import Heads, Texts, recur, short_conv


class NativeStates(StatesInPlace):
    """See `StatesInPlace`.

    Args:
      pool: arrays [slots, layers, ...] by name, see `KVCache.states`. layer: index in them.
      slots: [R] each, to read and to write.
    """

    def __init__(self, pool: State, layer: Any, slots: tuple[jax.Array, jax.Array], tokens: TextTokens):
        of_texts, of_tokens = jnp.stack([*slots, tokens.last]), jnp.stack([tokens.text, tokens.nth])
        self._pool, self._texts = pool, Texts(of_texts, of_tokens, layer)

    def short_conv(self, inputs: State, gate: jax.Array | None, p: Any) -> tuple[jax.Array, State]:
        x = inputs["conv"]
        gate = jnp.zeros_like(x) if gate is None else gate
        out, pool = short_conv(x, gate, p.w_conv, p.b_conv, self._pool["conv"], self._texts)
        return out, {"conv": pool}

    def matrices(
        self, inputs: State, gate: jax.Array | None, p: Any, spec: Any, bias: jax.Array | None, terms: OfInputs
    ) -> tuple[jax.Array, State]:
        # XLA computes decays and betas, functions of single numbers, and drops the terms that C++ computes.
        given = inputs["conv"]
        found = jax.vmap(terms)(jnp.zeros_like(given), inputs["decay"], inputs.get("beta"))
        beta, is_mamba = found.beta, isinstance(spec, Mamba2Spec)
        if beta is None:
            beta = jax.nn.softplus(inputs["decay"] + p.b_decay)  # Mamba-2's dt, which its terms multiply v by
        if gate is None:
            gate = jnp.zeros((len(given), spec.num_value_heads * spec.value_dim), jnp.float32)
        heads = Heads(
            jnp.exp(found.g),
            beta,
            gate,
            p.mamba_norm if is_mamba else p.delta_norm,
            spec.eps,
            spec.num_key_heads if is_mamba else spec.num_value_heads,
            delta=not is_mamba,
            skip=p.skip,
            gate_first=is_mamba,
            sigmoid=getattr(spec, "rank", None) is not None,
        )
        taps = p.w_conv_q, p.w_conv_k, p.w_conv_v
        out, pools = recur(given, taps, bias, heads, (self._pool["conv"], self._pool["matrix"]), self._texts)
        return out, dict(zip(("conv", "matrix"), pools, strict=True))
