"""Snapshots where texts part."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ksana_jax.kv.state_snapshots.base import SnapshotPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forks(SnapshotPolicy):
    """Caches the state where a prompt parts from a text whose keys and values are cached: the third text with that
    beginning is the first to find it."""

    at_forks: ClassVar[bool] = True

    def next_block(self, num_blocks: int, num_prompt: int) -> int | None:
        """See `SnapshotPolicy`."""
        return None
