"""The newest tokens, with and without the first ones: windows and sinks as evictions, for sweeps at equal bytes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(EvictionMethod):
    """Keeps the newest tokens: a sliding window. With interval=1, a query attends to budget + 1 tokens."""

    recent: float | int = 1.0

    head_by_head: ClassVar[bool] = True

    def priority(self, cached: Cached, xp: Any) -> Array:
        slots = xp.arange(cached.keys.shape[3], dtype=xp.float32)
        return xp.broadcast_to(slots, cached.keys.shape[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingLLM(Window):
    """Keeps the first tokens, attention sinks, and the newest ones, with positions in the cache.

    Source: Xiao et al., arXiv:2309.17453, section 3.2. `pattern="streaming_llm"` needs no moves: it masks and frees.
    """

    sinks: int = 4
    positions: Literal["absolute", "cache"] = "cache"
