"""The first pass of the eviction method `oracle`: the attention that each token of a text receives, in the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ksana_jax.kv.layout import SCORE

if TYPE_CHECKING:
    from ksana_jax import LLM


@contextlib.contextmanager
def foreseen(llm: LLM, ids: list[int]) -> Iterator[None]:
    """Returns a context in which an engine with kv_eviction "oracle" can score one text.

    Raises:
      RuntimeError: requests are running.
      ValueError: the pool has no room for the whole text.
    """
    eviction = llm.engine.scheduler.layout.eviction
    assert eviction is not None
    # Enough for the whole text in every layer, also of a pyramid.
    llm.engine.set_eviction(dataclasses.replace(eviction.method, budget=2 * llm.engine.max_model_len))
    try:
        llm.engine.set_eviction(dataclasses.replace(eviction.method, scores=attention_received(llm, ids)))
        yield
    finally:
        llm.engine.set_eviction(eviction.method)


def attention_received(llm: LLM, ids: list[int]) -> np.ndarray:
    """Computes a text and returns the attention weights that each token has received: [Gk, Lg, K, T] float32.

    Queries are those that predict tokens of the text: all but the last one.

    Args:
      llm: idle; its layers cache the whole text, and their method of eviction observes.
    """
    from ksana_jax import SamplingParams

    engine, scheduler = llm.engine, llm.engine.scheduler
    # Of the two output tokens one is computed, so that the row is still there when its prompt is done.
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    request = engine.add_request(np.array(ids[:-1], np.int32), params)
    rows = scheduler.rows
    while not len(scheduler.order) or rows.num_computed[scheduler.order[0]] < len(ids) - 1:
        engine.step()
    row = int(scheduler.order[0])
    leaf = llm.runner.cache.leaves[SCORE]
    found = np.zeros((rows.num_groups, leaf.shape[1], leaf.shape[3], len(ids)), np.float32)
    for group, (table, count) in enumerate(zip(rows.block_tables[:, row], rows.num_blocks[:, row], strict=True)):
        if scheduler.layout.groups[group].share is not None:
            blocks = np.asarray(leaf[table[:count]])[:, :, 0]  # [P, Lg, K, B]
            of_slots = np.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1)
            found[group, ..., :-1] = of_slots[..., : len(ids) - 1]
    engine.abort(request.request_id)
    return found
