"""MiKV: unimportant tokens stay in few bits instead of being evicted (Yang et al., arXiv:2402.18096, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.eviction.base import Array, Cached
from ksana_jax.kv.eviction.wrapper import EvictionWrapper
from ksana_jax.methods.eviction.h2o import H2O


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiKV(EvictionWrapper):
    """Stores the tokens that the method inside keeps in the pool's codec, and others in one of fewer bits.

    The budget counts slots of the pool, its memory. As many of them as are needed, up to a share, hold several tokens
    each; where they do not suffice for a text, the oldest of their tokens are dropped. A token never gets its bits
    back.

    Args:
      of: importance, {"method": a name} and its own settings; or an `EvictionMethod`.
      codec: of unimportant tokens, a `kv_cache_dtype` that encodes each vector.
      share: largest share of slots with unimportant tokens, among those beyond `sinks` and `recent`.
      balance: channels of keys are divided by their largest magnitude at the first eviction to this power before they
        are stored in few bits; 0 leaves them. The factors take H numbers in float32 in each block, layer and KV head.
        The authors' are the square root of that of queries over that of keys.
    """

    of: Any = dataclasses.field(default_factory=H2O)
    codec: str = "int4"
    share: float = 0.5
    balance: float = 0.0

    low_codec: ClassVar[Any] = property(lambda self: self.codec)
    balances: ClassVar[Any] = property(lambda self: self.balance > 0)

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.number("kv_eviction MiKV: share", self.share, 0, 1),
            checks.number("kv_eviction MiKV: balance", self.balance, 0, 1),
            "kv_eviction MiKV: balance needs a method inside without a state of its own"
            if self.balance and self.inner.state_shape(1, 2) is not None
            else None,
            error=ConfigError,
        )
        find_codec(self.codec)

    @property
    def stored(self) -> str:
        return f"{self.inner.stored}, tokens in {self.codec}" + f", balanced by {self.balance}" * bool(self.balance)

    def state_shape(self, num_queries: int, head_dim: int) -> tuple[int, ...] | None:
        return (head_dim,) if self.balance else self.inner.state_shape(num_queries, head_dim)

    def observe(self, q: Array, text_positions: Array, xp: Any) -> Array:
        return xp.zeros_like(q[:, :, 0]) if self.balance else self.inner.observe(q, text_positions, xp)

    def low_factors(self, cached: Cached, xp: Any) -> Array:
        used = xp.arange(cached.keys.shape[3]) < cached.num_tokens[:, None, None, None]
        largest = xp.where(used[..., None], xp.abs(cached.keys), 0).max(axis=3)
        found = xp.where(largest > 0, largest, 1) ** -self.balance
        return xp.where(cached.state > 0, cached.state, found).astype(xp.float32)

    def low_slots(self, num_tokens: Array, num_kept: Array, num_stay: Array, per_slot: int, xp: Any) -> Array:
        needed = -((num_kept - num_tokens) // (per_slot - 1))
        return xp.minimum(needed, (self.share * (num_kept - num_stay)).astype(xp.int32))
