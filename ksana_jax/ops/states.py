"""States of recurrent layers in their pool: read for the texts of a step, and written after its tokens.

A step with drafts writes no states. It keeps the numbers that they are computed from, and once it is known which tokens
are accepted, these are computed again (ReplaySSM, vLLM #47572).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import FAR
from ksana_jax.models.layers import Linear
from ksana_jax.models.params import LayerParams
from ksana_jax.models.recurrent import Mix, Recur, TextTokens, mixer
from ksana_jax.ops.paged import PagedLayer
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import StepShape


def paged_recur(layers: Sequence[PagedLayer], shape: StepShape) -> Recur:
    """Returns a `Recur` for some layers of a step, which carries the KVCache."""
    # Only of wide tiles with all tokens sampled may drafts be verified.
    keeps = len(shape.parts) == 1 < shape.parts[0].width and shape.num_tokens <= shape.max_sampled

    def recur(index: int, mix: Mix, x: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        layer = layers[index]
        (source, target, last, _), (text, nth) = layer.batch.states
        inputs, gate = mix.project(x)
        out, after = mix.advance(inputs, gate, _read(cache, source, layer.at), TextTokens(text, nth, last))
        assert out is not None
        cache = _written(cache, target, layer.at, after)
        if keeps:
            cache = cache.replace(inputs=(*cache.inputs, inputs))  # pyright: ignore[reportAttributeAccessIssue]
        return out, cache

    return recur


def advanced(
    cache: KVCache,
    inputs: Sequence[dict[str, jax.Array]],
    states: Any,
    accepted: jax.Array,
    width: int,
    layers: Sequence[LayerParams],
    config: ModelConfig,
    linear: Linear,
) -> KVCache:
    """Writes the states after the accepted tokens of a step with drafts.

    Args:
      inputs: `KVCache.inputs` after the step. states: its `StateArrays`.
      accepted: [R] number of draft tokens accepted after the first token of each tile of `width`.
    """
    (source, _, _, target), (text, nth) = states
    tile = jnp.arange(len(accepted)) * width
    tokens = TextTokens(jnp.where(nth <= jnp.repeat(accepted, width), text, FAR), nth, tile + accepted)
    recurrent = [(p, spec.recurrent) for p, spec in zip(layers, config.layers, strict=True) if spec.recurrent]
    for at, ((p, spec), of_layer) in enumerate(zip(recurrent, inputs, strict=True)):
        _, after = mixer(p, spec, linear).advance(of_layer, None, _read(cache, source, at), tokens)
        cache = _written(cache, target, at, after)
    return cache


def _read(cache: KVCache, slots: jax.Array, at: Any) -> dict[str, jax.Array]:
    """Returns the states of a layer; a slot that does not exist stands for zeros."""
    return {name: leaf.at[slots, at].get(mode="fill", fill_value=0) for name, leaf in cache.states.items()}


def _written(cache: KVCache, slots: jax.Array, at: Any, states: dict[str, jax.Array]) -> KVCache:
    """Returns the pool with states of a layer; a slot that does not exist is not written to."""
    written = {name: leaf.at[slots, at].set(states[name], mode="drop") for name, leaf in cache.states.items()}
    return cache.replace(states=written)  # pyright: ignore[reportAttributeAccessIssue]
