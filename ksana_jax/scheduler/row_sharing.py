"""Blocks of a running row for others: for sequences that begin with its tokens, for snapshots, and on the host."""

from __future__ import annotations

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.state import HeldBlocks, Origin
from ksana_jax.scheduler.row_blocks import RowBlocks


def share(blocks: RowBlocks, row: int, num_tokens: int) -> HeldBlocks:
    """Adds an owner to the blocks of a row's first tokens, and returns them."""
    held = before(blocks, row, num_tokens)
    assert num_tokens == blocks.rows.num_computed[row] or not np.any(held.num_evicted), "the beginning is missing"
    blocks.memory.blocks.share(held.ids)
    blocks.rows.forked[row] = True
    return held._replace(origins=Origin.SHARED)


def before(blocks: RowBlocks, row: int, num_tokens: int) -> HeldBlocks:
    """Returns a row's blocks that begin before a sequence position, which is after its last eviction."""
    r = blocks.rows
    evicted = r.num_evicted[:, row].copy()
    starts, groups = r.of_blocks(r.block_starts, row), np.repeat(np.arange(r.num_groups), r.num_blocks[:, row])
    some = starts < num_tokens - evicted[groups]
    return HeldBlocks(r.block_ids(row)[some], starts[some], groups[some], num_tokens, num_evicted=evicted)


def swap_out(blocks: RowBlocks, row: int) -> HeldBlocks | None:
    """Swaps a row's computed blocks to the host and returns their slots; None if recomputation is better."""
    swap, r = blocks.memory.swap, blocks.rows
    if swap is None or row in r.probes or (r.num_computed[row] >= r.evict_at[:, row]).any():  # it could not evict
        return None
    filled = before(blocks, row, int(r.num_computed[row]))
    if not filled.num_computed or not swap.is_better(len(filled.ids), filled.num_computed):
        return None
    state = FAR
    if (states := blocks.memory.states) is not None and (state := states.swap_out(int(r.state_from[row]))) is None:
        return None
    return filled._replace(ids=swap.move_out(filled.ids), origins=Origin.SWAPPED, state=state)
