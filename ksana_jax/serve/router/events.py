"""Changes of a server's prefix cache, as it reports them, with the names and fields of vLLM's KV events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ksana_jax.serve.router.request import Hash

DEVICE = "GPU"  # vLLM's name for the device's own memory, whatever the device


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that are cached now. parent_block_hash: of the block before the first; None at the start of a text."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None = None
    block_size: int = 16
    medium: str = DEVICE


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that are no longer on a medium."""

    block_hashes: Sequence[Hash]
    medium: str = DEVICE


@dataclasses.dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
