"""Snapshots at the end of requests, like those of SGLang's radix cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ksana_jax.kv.state_snapshots.base import SnapshotPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestEnd(SnapshotPolicy):
    """Caches the state after the last full block of a request, output included, when it ends or is preempted, for the
    next turn of a chat. Until then, each running row holds one more slot."""

    last_only: ClassVar[bool] = True

    def next_block(self, num_blocks: int, num_prompt: int) -> int | None:
        """See `SnapshotPolicy`."""
        return max(num_blocks + 1, num_prompt)
