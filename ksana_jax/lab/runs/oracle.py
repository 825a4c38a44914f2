"""Input of the eviction method `oracle`: the attention that the tokens of a text receive from later queries."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ksana_jax import LLM


@contextlib.contextmanager
def foreseen(llm: LLM, ids: list[int]) -> Iterator[None]:
    """Returns a context where an engine with kv_eviction "oracle" can score one text.

    Raises:
      RuntimeError: requests are running.
    """
    eviction = llm.engine.scheduler.layout.eviction
    assert eviction is not None
    llm.engine.set_eviction(dataclasses.replace(eviction.method, future=future_attention(llm, ids)))
    try:
        yield
    finally:
        llm.engine.set_eviction(eviction.method)


def future_attention(llm: LLM, ids: list[int]) -> np.ndarray:
    """Returns the attention that tokens receive from later queries, [Gk, Lg, K, T + 1, T] float32.

    At [..., n, j] are the weights of token j for queries n, n + 1, ... of a text of T tokens with the full cache, added
    up over the query heads of a kv head. The last token is no query.

    Computed by the dense model, without blocks, codecs or evictions.
    """
    model, layout = dataclasses.replace(llm.model_config, pattern=llm.patterns), llm.engine.scheduler.layout
    from ksana_jax.models.joined import separate
    from ksana_jax.ops.weight_packing import unpacked

    params, tokens = separate(unpacked(llm.runner.params), llm.model_config), np.array(ids, np.int32)
    weights = np.asarray(_dense_weights()(params, tokens, config=model))[:, :, :-1]
    length = len(ids)
    of_kv_heads = weights.reshape(model.num_layers, model.num_kv_heads, -1, length - 1, length).sum(axis=2)
    found = np.zeros(
        (len(layout.groups), len(layout.groups[0].layers), model.num_kv_heads, length + 1, length), np.float32
    )
    for group, layers in enumerate(group.layers for group in layout.groups):
        sums = of_kv_heads[list(layers), :, ::-1].cumsum(axis=2)[:, :, ::-1]
        found[group, : len(layers), :, : length - 1] = sums
    return found


@functools.cache
def _dense_weights():
    import jax

    from ksana_jax.models.dense import attention_weights

    return jax.jit(attention_weights, static_argnames="config")
