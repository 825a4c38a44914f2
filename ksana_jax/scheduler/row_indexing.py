"""Adds the full blocks of running rows to the prefix index. Vectorised over rows."""

from __future__ import annotations

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.row_blocks import RowBlocks


def index_full(blocks: RowBlocks, rows: np.ndarray) -> None:
    """Adds the blocks that a step has filled to the prefix index."""
    r, size = blocks.rows, blocks.memory.block_size
    # Later steps may have advanced: they compute tokens that this step, or one of them, has sampled.
    computed = np.minimum(r.num_computed[rows], r.num_known[rows] - ~r.is_beam[rows])
    due = computed >= r.index_at[rows]
    if not np.count_nonzero(due):
        return
    rows, computed = rows[due], computed[due]
    states = [seq.kv for row in rows.tolist() if (seq := r.seqs[row]) is not None]
    first = np.array([state.num_indexed for state in states])
    count = computed // size - first
    ends = np.cumsum(count)
    which = np.repeat(np.arange(len(rows)), count)
    nth = np.arange(len(which)) + (first - ends + count)[which]
    at = _find(blocks, rows, which, nth * size)
    ids = np.where(at < 0, -1, r.block_tables[np.arange(blocks.rows.num_groups)[:, None], rows[which], at])
    lists, kept = ids.tolist(), [[] for _ in range(r.num_groups)]
    for row, state, end, number in zip(rows.tolist(), states, ends.tolist(), count.tolist(), strict=True):
        mine = [of_group[end - number : end] for of_group in lists]
        for group, of_group in enumerate(blocks.memory.prefixes.insert(state, r.token_ids[row], mine)):
            kept[group] += of_group
    if kept != lists:
        kept = np.array(kept, np.int32)
        group, place = np.nonzero(ids != kept)
        r.block_tables[group, rows[which[place]], at[group, place]] = kept[group, place]
        r.num_rewrites += 1
        blocks.memory.device.release(ids[group, place])
    r.index_at[rows] = [(state.num_indexed + 1) * size if state.cacheable else FAR for state in states]


def _find(blocks: RowBlocks, rows: np.ndarray, which: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns where tables have the blocks of some sequence positions: [Gk, n]; -1 if a row does not hold the block.

    Args:
      which: [n] index in `rows` of each block's row. starts: [n] sequence position of its first token.
    """
    r, width = blocks.rows, blocks.rows.block_starts.shape[2]
    if not blocks.windowed:  # nothing was returned
        return 0 * np.arange(blocks.rows.num_groups)[:, None] + starts // blocks.memory.block_size
    # One search in one sorted list: each table starts beyond all positions of the previous one.
    tables = np.arange(r.num_groups * len(rows)).reshape(r.num_groups, -1)
    held = (r.block_starts.take(rows, axis=1) + (FAR + 1) * tables[:, :, None]).ravel()
    table = tables.take(which, axis=1)
    wanted = starts + (FAR + 1) * table
    at = np.minimum(held.searchsorted(wanted), len(held) - 1)
    return np.where(held[at] == wanted, at - width * table, -1)
