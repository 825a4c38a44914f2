"""AdaKV: heads that attend widely keep more tokens (Feng et al., arXiv:2407.11550, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.kv.eviction.wrapper import EvictionWrapper
from ksana_jax.methods.eviction.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(EvictionWrapper):
    """Keeps the tokens with the highest priorities of a layer, whichever KV head they are in, and a share in each head.

    Another method gives the priorities, which must be comparable among heads. The budget is a head's on average: a
    layer with K heads keeps K times as many. Sinks and recent tokens stay in each head.

    Args:
      layerwise: False divides one budget among the heads of all layers, whose priorities must be comparable too, as
        KVzip's authors do.
      alpha: share of the budget that each head keeps by its own priorities, a token at least unless it is 0; as in
        kvpress. The authors' code mixes the split with an equal one, half and half.
      memory: "freed" gives each KV head blocks of its own, and rounds what it keeps to intervals.
    """

    of: Any = dataclasses.field(default_factory=SnapKV)
    prompts: Any = "once"
    memory: Any = "simulated"
    layerwise: bool = True
    alpha: float = 0.2

    per_head: ClassVar[bool] = True
    head_by_head: ClassVar[Any] = False
    measures: ClassVar[Any] = property(lambda self: not self.hides)

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.number("kv_eviction AdaKV: alpha", self.alpha, 0, 1),
            checks.boolean("kv_eviction AdaKV: layerwise", self.layerwise),
            "kv_eviction AdaKV: layers is pyramid, but layerwise is false: one budget for all layers has no pyramid"
            if not self.layerwise and self.layers != "uniform"
            else None,
            f"kv_eviction AdaKV: memory is 'freed', but {type(self.of).__name__} compares KV heads, which then have "
            "separate blocks: set it to 'simulated'"
            if self.measures and not self.of.head_by_head
            else None,
            error=ConfigError,
        )

    @property
    def across_layers(self) -> bool:
        return not self.layerwise

    def measure(self, cached: Cached, xp: Any) -> Array:
        priority = self.priority(cached, xp)
        slots = xp.arange(priority.shape[-1])
        num_tokens, num_recent, num_sinks = (
            x[:, None, None, None] for x in (cached.num_tokens, cached.num_recent, cached.num_sinks)
        )
        stays = (slots < num_sinks) | (slots >= num_tokens - num_recent)
        return xp.where(slots < num_tokens, xp.where(stays, xp.inf, priority), -xp.inf)

    def budgets(self, measured: np.ndarray, num_kept: int, num_prompt: int) -> np.ndarray:
        num_layers, num_heads, _ = measured.shape
        # In the order of tokens: among equals, older ones stay.
        order = (2, 0, 1) if self.across_layers else (0, 2, 1)
        together = measured.transpose(order).reshape(1 if self.across_layers else num_layers, -1)
        count = num_kept * num_heads * (num_layers if self.across_layers else 1)
        stays = np.zeros(together.shape, bool)
        np.put_along_axis(stays, np.argsort(-together, axis=1, kind="stable")[:, :count], True, axis=1)
        return stays.reshape([measured.shape[at] for at in order]).sum(axis=order.index(2))

    def priority(self, cached: Cached, xp: Any) -> Array:
        priority = xp.broadcast_to(self.inner.priority(cached, xp), cached.keys.shape[:-1])
        num_tokens, num_recent, num_kept, num_sinks = (
            x[:, None, None, None] for x in (cached.num_tokens, cached.num_recent, cached.num_kept, cached.num_sinks)
        )
        slots = xp.arange(priority.shape[-1])
        stays = (slots < num_sinks) | (slots >= num_tokens - num_recent)
        ordered = xp.where(slots < num_tokens, xp.where(stays, -xp.inf, -priority), xp.inf)
        rank = xp.argsort(xp.argsort(ordered, axis=-1, stable=True), axis=-1, stable=True)
        safe = xp.maximum(xp.floor(self.alpha * num_kept), self.alpha > 0)
        return xp.where(rank < safe, xp.inf, priority)
