"""Quest: reads the blocks whose keys may have the largest scores (Tang et al., arXiv:2406.10774, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.kv.selection.base import Array, SelectionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(SelectionMethod):
    """Reads the blocks with the highest upper bounds of attention scores.

    A block's summary is the minimum and the maximum of its keys in each dimension; the bound of a query's scores in the
    block is the sum over dimensions of max(q * minimum, q * maximum) (algorithm 1). The paper's models have a kv head
    for each query head. Heads that share a kv head read the same blocks here: those with the highest bound of any of
    them. The paper's page is a block of `block_size` tokens.

    Args:
      full_layers: the paper's two, where attention is not sparse.
    """

    full_layers: int = 2

    def summary_shape(self, head_dim: int) -> tuple[int, ...]:
        return 2, head_dim

    def summarise(self, keys: Array, used: Array, xp: Any) -> Array:
        used = used[:, None, :, None]
        least, most = xp.where(used, keys, xp.inf).min(axis=2), xp.where(used, keys, -xp.inf).max(axis=2)
        return xp.stack([least, most], axis=2)

    def scores(self, q: Array, summaries: Array, visible: Array, xp: Any) -> Array:
        # A negative number of the query has its largest product with the minimum, a positive one with the maximum.
        signed = xp.concatenate([xp.minimum(q, 0), xp.maximum(q, 0)], axis=-1)
        bounds = summaries.reshape(*summaries.shape[:-2], -1)
        return xp.einsum("sqkgh,skph->sqkgp", signed, bounds).max(axis=3)
