"""Snapshots at regular distances, like vLLM's retention interval (vLLM #43447)."""

from __future__ import annotations

import dataclasses

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.state_snapshots.base import SnapshotPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every(SnapshotPolicy):
    """Caches the state after every `blocks` blocks of a text, prompt and output, and at the end of its prompt."""

    blocks: int = 8

    def __post_init__(self):
        super().__post_init__()
        checks.require(checks.integer("state_snapshots blocks", self.blocks), error=ConfigError)

    def next_block(self, num_blocks: int, num_prompt: int) -> int | None:
        """See `SnapshotPolicy`."""
        following = (num_blocks // self.blocks + 1) * self.blocks
        return min(following, num_prompt) if num_blocks < num_prompt else following
