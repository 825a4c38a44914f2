"""Probes of rows: tokens that a row computes after its context and before it evicts, see `EvictionMethod.probe`.

A probe is in no text: its row's `token_ids` and `num_known` stay, and no step samples from it.
"""

from __future__ import annotations

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.row_blocks import RowBlocks


def turn(row_blocks: RowBlocks, rows: np.ndarray) -> np.ndarray:
    """Begins the probes of rows that have computed their contexts, and ends those that are computed themselves.

    Only between two steps, when the tokens of all rows are known.

    Args:
      rows: those that are due to evict.

    Returns:
      The rows whose probes have ended. But for scores they are as after their contexts, and evict now.
    """
    r = row_blocks.rows
    ends = np.array([row in r.probes for row in rows.tolist()], bool)
    for row in rows.tolist():
        seq = r.seqs[row]
        assert seq is not None and seq.probe is not None and r.num_tokens[row] > seq.num_context
        end = seq.num_context
        if r.probes.pop(row, None) is not None:
            r.num_computed[row], r.num_tokens[row] = end, r.num_known[row]
        else:
            assert r.num_tokens[row] == r.num_known[row]
            r.probes[row] = seq.probe
            end += len(seq.probe)
            r.num_tokens[row] = end + 1
        evict_at = r.evict_at[:, row]
        evict_at[evict_at < FAR] = end
    r.num_rewrites += 1
    row_blocks.trim(rows[ends])
    row_blocks.num_ahead = 0
    return rows[ends]
