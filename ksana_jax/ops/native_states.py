"""States of recurrent layers that C++ updates in their pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.recurrent import Mamba2Spec
from ksana_jax.models.recurrent import OfInputs, State, StatesInPlace
from ksana_jax.native.recurrent import Heads, Texts, recur, short_conv
from ksana_jax.scheduler.step.per_token import StateArrays


class NativeStates(StatesInPlace):
    """pool: arrays [slots, layers, ...] by name, see `KVCache.states`. layer: index in them. arrays: of the step."""

    def __init__(self, pool: State, layer: Any, arrays: StateArrays):
        self._pool, self._texts = pool, Texts(*arrays, layer)

    def short_conv(self, given: jax.Array, p: Any) -> tuple[jax.Array, State]:
        out, pool = short_conv(given, p.w_conv, p.b_conv, self._pool["conv"], self._texts)
        return out, {"conv": pool}

    def matrices(
        self, p: Any, spec: Any, given: jax.Array, bias: jax.Array | None, others: Sequence[jax.Array], terms: OfInputs
    ) -> tuple[jax.Array, State]:
        # XLA computes decays and betas, functions of single numbers, and drops the terms that C++ computes.
        found = jax.vmap(terms)((jnp.zeros_like(given), *others))
        beta = found.beta
        of_heads = (len(given), spec.num_value_heads, -1)
        decay, is_mamba = jnp.exp(found.g).reshape(of_heads), isinstance(spec, Mamba2Spec)
        if beta is None:
            beta = jax.nn.softplus(others[0] + p.b_decay)  # Mamba-2's dt, which its terms multiply v by
        heads = Heads(
            decay,
            beta,
            others[1],
            p.delta_norm,
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
