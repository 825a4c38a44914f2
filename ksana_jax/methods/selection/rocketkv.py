"""RocketKV's hybrid sparse attention, its second stage (Behnam et al., arXiv:2502.14051, and NVlabs/RocketKV)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.selection.base import Array
from ksana_jax.methods.selection.quest import Quest


@dataclasses.dataclass(frozen=True, kw_only=True)
class RocketKV(Quest):
    """Reads the blocks with the largest estimates of attention weights, a mean over the heads that share a kv head.

    A block's summary is Quest's. In each dimension the sign of the sum of the heads' queries picks the maximum or the
    minimum, one for all of them. The dimensions in which the queries are largest give each head's scores, and a softmax
    over blocks its weights, with the temperature of SparQ (arXiv:2312.04985) for the other dimensions.

    The authors weigh tokens, the newest block among them. Here a block has one weight however many tokens it has, and
    the newest has none: it is read in any case, and its summary depends on the chunks of a prompt. Their first stage
    evicts from the prompt (`kv_eviction` snapkv), which does not go with selection.

    Args:
      top_r: dimensions that are scored: a float is a fraction of them, and half is about what the authors choose for an
        eighth of the tokens. They are compared, not skipped: a summary is read whole.
    """

    full_layers: int = 0
    top_r: int | float = 0.5

    def __post_init__(self):
        super().__post_init__()
        name = f"kv_selection {type(self).__name__}: top_r"
        is_share = isinstance(self.top_r, float)
        problem = checks.number(name, self.top_r, above=0, high=1) if is_share else checks.integer(name, self.top_r, 1)
        checks.require(problem, error=ConfigError)

    def scores(self, q: Array, summaries: Array, visible: Array, xp: Any) -> Array:
        count = self.top_r if isinstance(self.top_r, int) else round(self.top_r * q.shape[-1])
        size = xp.abs(q)
        order = xp.argsort(-size.mean(axis=3, keepdims=True), axis=-1, stable=True)
        scored = xp.where(xp.argsort(order, axis=-1) < max(count, 1), q, 0)
        rises = scored.sum(axis=3, keepdims=True) > 0
        signed = xp.concatenate([xp.where(rises, 0, scored), xp.where(rises, scored, 0)], axis=-1)
        bounds = summaries.reshape(*summaries.shape[:-2], -1)
        logits = xp.einsum("sqkgh,skph->sqkgp", signed, bounds)
        share = xp.abs(scored).sum(axis=-1, keepdims=True) / size.sum(axis=-1, keepdims=True)
        logits = xp.where(visible[:, :, :, None], logits / xp.sqrt(share), -1e30)
        weights = xp.exp(logits - logits.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=3)
