"""States of recurrent layers in their pool: read for the texts of a step, and written after its tokens.

A step with drafts writes no states. It keeps the numbers that they are computed from, and once it is known which tokens
are accepted, these are computed again (ReplaySSM, vLLM #47572).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import FAR
from ksana_jax.models.layers import Linear
from ksana_jax.models.params import LayerParams
from ksana_jax.models.recurrent import Mix, Recur, State, StatesInPlace, mixer
from ksana_jax.models.text_tokens import TextTokens
from ksana_jax.ops.paged import PagedLayer
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import StepShape


def paged_recur(
    layers: Sequence[PagedLayer], shape: StepShape, in_place: Callable[..., StatesInPlace] | None = None
) -> Recur:
    """Returns a `Recur` for some layers of a step, which carries the KVCache.

    A step whose drafts may be verified adds to `KVCache.inputs` what `ShortConvSpec.inputs` names, arrays
    [1, 1, T, ...]: devices divide their last axis, the fourth, as they divide that of blocks.

    in_place: `NativeStates`, or None to read states from the pool and to write them back.
    """
    # Only of wide tiles with all tokens sampled may drafts be verified.
    keeps = len(shape.parts) == 1 < shape.parts[0].width and shape.num_tokens <= shape.max_sampled
    only_decodes = all(part.width == 1 for part in shape.parts)
    # Rows that share blocks are packed in groups.
    num_alone = shape.parts[0].count if shape.parts[0].width == 1 and not shape.shared_rows else 0

    def recur(index: int, mix: Mix, x: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        layer = layers[index]
        (source, target, last, _), (text, nth) = layer.batch.states
        given = mix.project(x)
        continues = None if only_decodes else jnp.append(False, (source[1:] == target[:-1]) & (source[1:] < FAR))
        tokens = TextTokens(text, nth, last, continues, num_alone)
        out, cache = _advance(mix, given, cache, layer.at, (source, target), tokens, in_place)
        assert out is not None
        if keeps:
            kept = {name: x[None, None] for name, x in given[0].items()}
            cache = cache.replace(inputs=(*cache.inputs, kept))  # pyright: ignore[reportAttributeAccessIssue]
        return out, cache

    return recur


def advanced(
    cache: KVCache,
    inputs: KVCache,
    states: Any,
    accepted: jax.Array,
    width: int,
    layers: Sequence[LayerParams],
    config: ModelConfig,
    linear: Linear,
    in_place: Callable[..., StatesInPlace] | None,
) -> KVCache:
    """Writes the states after the accepted tokens of a step with drafts.

    Args:
      inputs: has the `KVCache.inputs` after the step. states: its `StateArrays`.
      accepted: [R] number of draft tokens accepted after the first token of each tile of `width`.
      in_place: see `paged_recur`.
    """
    of_texts, (text, nth) = states
    source, _, _, target = of_texts[:, : len(accepted)]
    tile = jnp.arange(len(accepted)) * width
    tokens = TextTokens(jnp.where(nth <= jnp.repeat(accepted, width), text, FAR), nth, tile + accepted, num_alone=0)
    recurrent = [(p, spec.recurrent) for p, spec in zip(layers, config.layers, strict=True) if spec.recurrent]
    for at, ((p, spec), of_layer) in enumerate(zip(recurrent, inputs.inputs, strict=True)):
        given = {name: x[0, 0] for name, x in of_layer.items()}
        _, cache = _advance(mixer(p, spec, linear), (given, None), cache, at, (source, target), tokens, in_place)
    return cache


def _advance(
    mix: Mix,
    given: tuple[State, jax.Array | None],
    cache: KVCache,
    at: Any,
    slots: tuple[jax.Array, jax.Array],
    tokens: TextTokens,
    in_place: Callable[..., StatesInPlace] | None,
) -> tuple[jax.Array | None, KVCache]:
    """Advances a layer's states from the first slots to the second. at: index of the layer in the pool.

    A slot that does not exist stands for zeros, and is not written to.
    """
    if in_place is not None:
        out, states = mix.advance(*given, in_place(cache.states, at, slots, tokens), tokens)
    else:
        before = {name: leaf.at[slots[0], at].get(mode="fill", fill_value=0) for name, leaf in cache.states.items()}
        # XLA fuses the reads into several kernels, and would copy the whole pool for one that runs after the write.
        out, after = mix.advance(*given, jax.lax.optimization_barrier(before), tokens)
        states = {name: leaf.at[slots[1], at].set(after[name], mode="drop") for name, leaf in cache.states.items()}
    return out, cache.replace(states=states)  # pyright: ignore[reportAttributeAccessIssue]
