"""Lightning indexer: reads the tokens that a model's own small heads choose (DeepSeek-V3.2, arXiv:2512.02556, section
2.1)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ksana_jax.kv.selection.base import Array, SelectionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightningIndexer(SelectionMethod):
    """Reads the tokens with the highest scores of an indexer, which the model was trained with, in all of its heads.

    The pool keeps a small key for each token in an array next to the latents. No token is read in any case, not even
    the newest. Of tokens with equal scores the older ones are read: where no product is positive, scores are 0.

    The published kernels turn queries and keys by a Hadamard matrix and round them to fp8. The matrix is orthogonal and
    changes no product; the rounding is left out, as in transformers.

    Args:
      budget: any number from 1. Models that have an indexer use it, with their `index_topk`, unless kv_selection names
        another method.
      prompts: "streamed" is what the models were trained with.
    """

    budget: int = 2048
    prompts: Literal["whole", "streamed"] = "streamed"
    by_token = True

    def num_blocks(self, block_size: int) -> int:
        return self.budget // block_size

    def num_tokens(self, block_size: int) -> int:
        return self.budget


def index_scores(q: Array, weights: Array, keys: Array, xp: Any) -> Array:
    """Returns the scores [..., T, C] of keys [..., C, Di] for queries [..., T, Hi, Di], float32: sums over heads of
    weight * relu(query . key), equation 1. weights: [..., T, Hi]."""
    q, keys = q.astype(xp.float32), keys.astype(xp.float32)
    return xp.einsum("...th,...thc->...tc", weights, xp.maximum(xp.einsum("...thd,...cd->...thc", q, keys), 0))
