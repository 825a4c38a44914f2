"""States of recurrent layers in their pool: read for the texts of a step, and written after its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from ksana_jax.models.recurrent import Mix, Recur, StatesInPlace, TextTokens
from ksana_jax.ops.paged import PagedLayer
from ksana_jax.ops.pool import KVCache


def paged_recur(layers: Sequence[PagedLayer], in_place: Callable[..., StatesInPlace] | None = None) -> Recur:
    """Returns a `Recur` for some layers, which carries the KVCache.

    in_place: `NativeStates`, or None to read states from the pool and to write them back.
    """

    def recur(index: int, mix: Mix, x: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        layer = layers[index]
        at, (source, target, last), (text, nth) = layer.at, *layer.batch.states
        # A slot that does not exist stands for zeros, and is not written to.
        if in_place is not None:
            out, states = mix(x, in_place(cache.states, at, layer.batch.states), TextTokens(text, nth, last))
            return out, cache.replace(states=states)  # pyright: ignore[reportAttributeAccessIssue]
        before = {name: leaf.at[source, at].get(mode="fill", fill_value=0) for name, leaf in cache.states.items()}
        out, after = mix(x, before, TextTokens(text, nth, last))
        states = {name: leaf.at[target, at].set(after[name], mode="drop") for name, leaf in cache.states.items()}
        return out, cache.replace(states=states)  # pyright: ignore[reportAttributeAccessIssue]

    return recur
