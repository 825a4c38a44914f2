"""Snapshots at the ends of prompts."""

from __future__ import annotations

import dataclasses

from ksana_jax.kv.state_snapshots.base import SnapshotPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptEnd(SnapshotPolicy):
    """Caches the state after the last full block of a prompt, for prompts that continue it, and for it itself after a
    preemption."""

    def next_block(self, num_blocks: int, num_prompt: int) -> int | None:
        """See `SnapshotPolicy`."""
        return num_prompt if num_blocks < num_prompt else None
