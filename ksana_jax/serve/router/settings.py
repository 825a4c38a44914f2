"""Settings of a router that all policies share."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RouterSettings:
    """The router's assumptions about servers that report nothing.

    Args:
      block_size: prompt tokens for which there is one hash.
      prefill_tokens_per_s: rate of prefill of a server. The pace of all servers together is measured from first tokens
        and corrects it; between equal servers no decision depends on it.
      context_tokens: context length at which attention doubles the cost of a token's prefill; None neglects attention.
      decode_row_s: seconds by which each decoding request delays a prefill.
      pool_tokens: tokens that fit a server's KV pool; None if unknown: its cache is then expected to keep every
        prompt for ttl_s.
      full_pool: fraction of the pool that unfinished requests may hold before full_pool_s are added to the cost.
      full_pool_s: seconds that a request waits or loses by preemption on a server whose pool is full.
      slow_hit_cost: time to copy a cached block from slower media, such as host memory, to the device, relative to its
        prefill. The default is Dynamo's.
      ttl_s: seconds for which a prompt is expected to stay in the cache of the server that it was sent to.
    """

    block_size: int = 16
    prefill_tokens_per_s: float = 8000.0
    context_tokens: float | None = None
    decode_row_s: float = 0.001
    pool_tokens: int | None = None
    full_pool: float = 0.95
    full_pool_s: float = 1.0
    slow_hit_cost: float = 0.25
    ttl_s: float = 120.0

    def __post_init__(self) -> None:
        checks.require(
            checks.integer("block_size", self.block_size),
            checks.number("prefill_tokens_per_s", self.prefill_tokens_per_s, above=0),
            checks.number("context_tokens", self.context_tokens, above=0, optional=True),
            checks.number("decode_row_s", self.decode_row_s, 0),
            checks.integer("pool_tokens", self.pool_tokens, optional=True),
            checks.number("full_pool", self.full_pool, above=0, high=1),
            checks.number("full_pool_s", self.full_pool_s, 0),
            checks.number("slow_hit_cost", self.slow_hit_cost, 0),
            checks.number("ttl_s", self.ttl_s, above=0),
            error=ConfigError,
        )

    def work(self, num_tokens: Any, context: Any) -> Any:
        """Tokens of prefill, weighted by the cost of the context that they attend to; ints or arrays of them."""
        if self.context_tokens is None:
            return num_tokens
        return num_tokens + num_tokens * (context + num_tokens // 2) // self.context_tokens
