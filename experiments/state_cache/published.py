"""Where another engine caches states, as a policy of this one."""

from __future__ import annotations

import dataclasses

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.state_snapshots.base import SnapshotPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multiples(SnapshotPolicy):
    """Caches states after multiples of `blocks` blocks alone, as vLLM's align mode at the ends of its blocks: with
    Qwen3-Next, one has 528 tokens, 33 blocks of 16 (vLLM #30877, #40696)."""

    blocks: int = 33

    def __post_init__(self):
        super().__post_init__()
        checks.require(checks.integer("state_snapshots blocks", self.blocks), error=ConfigError)

    def next_block(self, num_blocks: int, num_prompt: int) -> int:
        """See `SnapshotPolicy`."""
        return (num_blocks // self.blocks + 1) * self.blocks
