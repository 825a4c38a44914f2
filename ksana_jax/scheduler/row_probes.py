"""Probes of rows: tokens that a row computes after its context and before it evicts, see `EvictionMethod.probe`.

A probe is in no sequence: its row's `token_ids` and `num_known` stay, and no step samples from it.
"""

from __future__ import annotations

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.row_returns import trim


def turn(method: EvictionMethod, row_blocks: RowBlocks, rows: np.ndarray) -> np.ndarray:
    """Begins the probes of rows that have computed their contexts, and ends those that are computed themselves.

    Only between two steps, when the tokens of all rows are known.

    Args:
      rows: those that are due to evict.

    Returns:
      The rows whose probes have ended. But for scores they are as after their contexts, and evict now.
    """
    r = row_blocks.rows
    ended = rows[[row in r.probes for row in rows.tolist()]]
    for row in rows.tolist():
        seq, evict_at = r.seqs[row], r.evict_at[:, row]
        assert seq is not None and r.num_known[row] > seq.num_context
        end = seq.num_context
        if r.probes.pop(row, None) is not None:
            r.num_computed[row], r.num_tokens[row] = end, r.num_known[row]
            r.return_at[:, row], r.snapshot_at[row] = 0, FAR if row_blocks.memory.prefixes.snapshots is None else end
            asked = seq.params.prompt_logprobs
            r.settings.num_prompt_logprobs[row] = -1 if asked is None else asked
        else:
            assert r.num_tokens[row] == r.num_known[row]
            context = r.token_ids[row, :end]
            r.probes[row] = np.concatenate([context, method.probe(context)])
            end = len(r.probes[row])
            # It has tokens left, returns no block that the sequence will attend to, and reports no score.
            r.num_tokens[row], r.settings.num_prompt_logprobs[row] = end + 1, -1
            r.return_at[:, row] = r.snapshot_at[row] = FAR
        evict_at[evict_at < FAR] = end
    r.num_rewrites += 1
    trim(row_blocks, ended)
    row_blocks.num_ahead = 0
    return ended
