"""Sums over the tokens of texts of what a model's layers compute, by the dense model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.dense import dense_attend
from ksana_jax.models.params import Params
from ksana_jax.models.transformer import forward

# First tokens of each text; their queries and keys are outliers, and sinks stay cached.
NUM_SKIPPED = 4


def layer_sums(params: Params, config: ModelConfig, tokens: np.ndarray, observe: Callable[..., Any]) -> list[Any]:
    """Returns for each layer the sums, float64, over texts [n, T] of what `observe` returns.

    Args:
      observe: (layer, q [T', N, H], k [T', K, H], v [T', K, H]) -> arrays; before the rotation, without the first
        NUM_SKIPPED tokens of a text; k and v are None in layers that read another layer's.
    """
    dense = dense_attend(params, tokens.shape[1], config=config)

    def attend(layer, q, k, v, found):
        out, _ = dense(layer, q, k, v, None)
        return out, (*found, observe(layer, *(None if x is None else x[NUM_SKIPPED:] for x in (q, k, v))))

    run = jax.jit(lambda params, tokens: forward(params, tokens, attend, (), config=config)[1])
    total: Any = 0.0
    for text in tokens:
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), run(params, text))
        total = found if isinstance(total, float) else jax.tree.map(np.add, total, found)
    return list(total)
