"""CriticalKV: tokens whose values change the output most (Feng et al., arXiv:2502.03805, section 4)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.kv.eviction.wrapper import EvictionWrapper
from ksana_jax.methods.eviction.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticalKV(EvictionWrapper):
    """Keeps a part of the budget by the priority of the method inside, and the rest by priority times the L1 norm of
    the value after the output matrix, the mean over the query heads of a kv head.

    The method inside must have priorities above 0, such as attention weights.

    Args:
      first_stage: part of the kept tokens that the method inside chooses; sinks and recent ones are among them.
      epsilon: added to priorities before they are multiplied.
    """

    of: Any = dataclasses.field(default_factory=SnapKV)
    first_stage: float = 0.5
    epsilon: float = 1e-4

    reads_outputs: ClassVar[Any] = True
    head_by_head: ClassVar[Any] = False  # an engine has one copy of the output matrices

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.number("kv_eviction CriticalKV: first_stage", self.first_stage, 0, 1),
            checks.number("kv_eviction CriticalKV: epsilon", self.epsilon, 0),
            error=ConfigError,
        )

    def priority(self, cached: Cached, xp: Any) -> Array:
        priority = xp.broadcast_to(self.inner.priority(cached, xp), cached.keys.shape[:-1]).astype(xp.float32)
        num_tokens, num_sinks, num_recent, num_kept = (
            x[:, None, None, None] for x in (cached.num_tokens, cached.num_sinks, cached.num_recent, cached.num_kept)
        )
        slots = xp.arange(priority.shape[-1])
        open_ = (slots >= num_sinks) & (slots < num_tokens - num_recent)
        order = xp.argsort(xp.where(open_, -priority, xp.inf), axis=-1, stable=True)
        num_first = xp.floor(num_kept * xp.float32(self.first_stage)) - num_sinks - num_recent
        first = xp.argsort(order, axis=-1, stable=True) < num_first
        n, layers, heads, num_slots = priority.shape
        norms = cached.output_norms.reshape(n, layers, heads, -1, num_slots).mean(axis=3)
        return xp.where(first, xp.inf, (priority + self.epsilon) * norms)
