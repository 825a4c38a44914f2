"""KeyDiff: keys that differ from the mean key (Park et al., arXiv:2504.15364, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyDiff(EvictionMethod):
    """Keeps the tokens whose keys have the smallest cosine similarity to the mean of the normalised keys.

    It observes no attention, and no token is exempt. The authors evict after each block of 128 prompt tokens
    (prompts="streamed", interval=128).
    """

    head_by_head: ClassVar[bool] = True

    def priority(self, cached: Cached, xp: Any) -> Array:
        keys = normalised(cached, xp)
        return -(keys * keys.sum(axis=-2, keepdims=True)).sum(axis=-1)


def normalised(cached: Cached, xp: Any) -> Array:
    """Returns the keys divided by their L2 norm, [n, Lg, K, C, H] float32; zeros in unused slots and for zero keys."""
    keys = cached.keys.astype(xp.float32)
    used = xp.arange(keys.shape[-2]) < cached.num_tokens[:, None, None, None]
    keys = xp.where(used[..., None], keys, 0)
    norms = xp.sqrt((keys * keys).sum(axis=-1, keepdims=True))
    return keys / xp.where(norms > 0, norms, 1)
