"""Changes of a server's prefix cache, as it reports them, with the names and fields of vLLM's KV events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ksana_jax.serve.router.request import Hash

DEVICE = "GPU"  # vLLM's name for the device's own memory, whatever the device
STATES = "mamba"  # vLLM's name for recurrent layers of any kind


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that are cached now. parent_block_hash: of the block before the first; None at the start of a text.

    group_idx: the group of layers that they belong to; None if there is one. kv_cache_spec_kind: of that group. A block
    of `STATES` is the state after it, and a prefix is of use up to a block that is cached in both groups.
    """

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None = None
    block_size: int = 16
    medium: str = DEVICE
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks of a group that are no longer on a medium."""

    block_hashes: Sequence[Hash]
    medium: str = DEVICE
    group_idx: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
