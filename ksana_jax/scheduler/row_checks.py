"""Checks the block tables of running rows against the rows' needs. Changes nothing."""

from __future__ import annotations

import itertools

import numpy as np

from ksana_jax.kv.block_manager import BlockManager
from ksana_jax.kv.layout import KVLayout
from ksana_jax.scheduler.row_blocks import RowBlocks


def check_row_blocks(row_blocks: RowBlocks, layout: KVLayout, pool: BlockManager, rows: list[int]) -> None:
    """Checks tables against the tokens that their rows have computed and will attend to.

    Raises:
      AssertionError: a block that is needed is missing, one that is about to be written to is shared, or a count is
        wrong.
    """
    r, size, ranges = row_blocks.rows, layout.block_size, [group.live for group in layout.groups]
    ahead = (r.allocated_until - r.num_computed) // size  # 0 of free rows
    counted = int(r.num_blocks.sum()), int(ahead.sum()) * r.num_groups
    assert (row_blocks.num_held, row_blocks.num_ahead) == counted, "blocks that rows hold are miscounted"
    for live in {live for live in ranges if live.window is not None}:
        groups = [group for group, other in enumerate(ranges) if other == live]
        assert (r.block_starts[groups] == r.block_starts[groups[0]]).all(), "groups of one live range differ"
    for row, (group, live) in itertools.product(rows, enumerate(ranges)):
        starts = r.block_starts[group, row, : r.num_blocks[group, row]]
        assert (np.diff(starts) > 0).all(), "blocks are out of order"
        assert r.num_computed[row] <= r.allocated_until[row], "computed tokens without a block"
        evicted = r.num_evicted[group, row]
        positions = np.arange(0, r.allocated_until[row] - evicted, size)
        alive = ~live.dead_blocks(positions, size, r.num_computed[row] - evicted)
        assert set(positions[alive].tolist()) <= set(starts.tolist()), "a visible block was returned"
        if r.num_computed[row] < r.allocated_until[row] and not r.forked[row]:
            last = r.block_tables[group, row, r.num_blocks[group, row] - 1]
            own = pool.ref_count[last] == 1 and not pool.kept[last]
            assert own, "a block that will be written to has other owners"
        if row_blocks.copying.scored[group] and not r.forked[row]:
            ids = r.block_tables[group, row, : r.num_blocks[group, row]]
            own = (pool.ref_count[ids] == 1).all() and not pool.kept[ids].any()
            assert own, "others own a block whose scores will change"
