"""MiKV: unimportant tokens stay in few bits instead of being evicted (Yang et al., arXiv:2402.18096, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.eviction.base import Array
from ksana_jax.kv.eviction.wrapper import EvictionWrapper
from ksana_jax.methods.eviction.h2o import H2O


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiKV(EvictionWrapper):
    """Stores the tokens that the method inside keeps in the pool's codec, and others in one of fewer bits.

    The budget counts slots of the pool, its memory. As many of them as are needed, up to a share, hold several tokens
    each; where they do not suffice for a text, the oldest of their tokens are dropped. A token never gets its bits
    back. The authors also divide the channels of keys by balancing factors.

    Args:
      of: importance, {"method": a name} and its own settings; or an `EvictionMethod`.
      codec: of unimportant tokens, a `kv_cache_dtype` that encodes each vector.
      share: largest share of slots with unimportant tokens, among those beyond `sinks` and `recent`.
    """

    of: Any = dataclasses.field(default_factory=H2O)
    codec: str = "int4"
    share: float = 0.5

    low_codec: ClassVar[Any] = property(lambda self: self.codec)

    def __post_init__(self):
        super().__post_init__()
        checks.require(checks.number("kv_eviction MiKV: share", self.share, 0, 1), error=ConfigError)
        find_codec(self.codec)

    @property
    def stored(self) -> str:
        return f"{self.inner.stored}, tokens in {self.codec}"

    def low_slots(self, num_tokens: Array, num_kept: Array, num_stay: Array, per_slot: int, xp: Any) -> Array:
        needed = -((num_kept - num_tokens) // (per_slot - 1))
        return xp.minimum(needed, (self.share * (num_kept - num_stay)).astype(xp.int32))
