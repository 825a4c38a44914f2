"""Blocks that rows return before they end: no longer visible, or taken for drafts that were rejected."""

from __future__ import annotations

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.state import Origin
from ksana_jax.kv.visible_range import VisibleRange
from ksana_jax.scheduler.row_blocks import RowBlocks


def return_invisible(blocks: RowBlocks, rows: np.ndarray) -> None:
    """Releases blocks that no later query of their row attends to."""
    for live, groups in blocks.windowed:
        _return_invisible(blocks, live, groups, rows)


def _return_invisible(blocks: RowBlocks, live: VisibleRange, groups: np.ndarray, rows: np.ndarray) -> None:
    r, size, first = blocks.rows, blocks.memory.block_size, groups[0]
    # Block size 4, window 4: block 0..3 leaves the window of query 7, block 4..7 the window of query 11.
    computed = r.num_computed[rows] - r.num_evicted[first, rows]
    visible_from = live.visible_from(computed)
    due = visible_from >= r.return_at[first, rows]
    if not np.count_nonzero(due):
        return
    rows, computed = rows[due], computed[due]
    r.return_at[first, rows] = (visible_from[due] // size + 1) * size
    width = int(r.num_blocks[first, rows].max())
    starts = r.block_starts[first, rows, :width]
    dead = live.dead_blocks(starts, size, computed[:, None])
    count = dead.sum(axis=1, dtype=np.int32)
    if not np.count_nonzero(count):
        return
    order = np.argsort(dead, axis=1, kind="stable")  # live blocks move up, dead ones go to the end
    tail = slice(width - int(count.max()), width)
    is_dead = np.arange(tail.start, width) >= (width - count)[:, None]
    at = rows[:, None] * r.block_tables.shape[2] + order
    of_groups = r.block_tables.reshape(r.num_groups, -1), r.block_origins.reshape(r.num_groups, -1)
    tables, origins = (values.take(at, axis=1)[groups] for values in of_groups)
    starts = starts[np.arange(len(rows))[:, None], order]
    blocks.memory.device.release(dropped := tables[:, :, tail][:, is_dead].ravel())
    blocks.num_held -= len(dropped)
    starts[:, tail][is_dead], origins[:, :, tail][:, is_dead] = FAR, Origin.COMPUTED
    here = groups[:, None], rows
    r.num_rewrites += 1
    r.num_blocks[here] -= count
    for column, values in ((r.block_tables, tables), (r.block_starts, starts), (r.block_origins, origins)):
        column[*here, :width] = values


def trim(blocks: RowBlocks, rows: np.ndarray, num_left: np.ndarray | int = 0) -> None:
    """Releases the blocks of rows [n] that begin after their computed tokens and num_left [n] more: those taken for
    draft tokens that were rejected, or not drafted."""
    r, size = blocks.rows, blocks.memory.block_size
    extra = r.allocated_until[rows] - r.num_computed[rows] - num_left
    for row, count in zip(rows[extra >= size].tolist(), (extra // size)[extra >= size].tolist(), strict=True):
        for group, held in enumerate(r.num_blocks[:, row].tolist()):
            dropped = slice(held - count, held)
            blocks.memory.device.release(r.block_tables[group, row, dropped].copy())
            r.block_starts[group, row, dropped] = FAR
            r.block_tables[group, row, dropped] = 0
        r.num_blocks[:, row] -= count
        r.allocated_until[row] -= count * size
        r.num_rewrites += 1
        blocks.num_held -= r.num_groups * count
        blocks.num_ahead -= r.num_groups * count
