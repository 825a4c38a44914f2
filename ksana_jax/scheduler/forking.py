"""Sequences that continue others: beams, and completions of a prompt that is computed once. They share blocks."""

from __future__ import annotations

import numpy as np

from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.row_eviction import RowEviction
from ksana_jax.scheduler.row_sharing import share
from ksana_jax.scheduler.row_states import RowStates
from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.waiting import WaitingQueue


def append(rows: Rows, seq: Sequence, token: int) -> None:
    """Appends the token that a beam's request has chosen for it."""
    seq.awaits_token = False
    if seq.row is None:
        seq.token_ids = np.append(seq.token_ids, np.int32(token))
    else:
        rows.append(np.array([seq.row]), np.array([token], np.int32))


def fork(
    queue: WaitingQueue,
    blocks: RowBlocks,
    eviction: RowEviction | None,
    states: RowStates | None,
    parent: Sequence,
    child: Sequence,
    num_computed: int | None = None,
) -> None:
    """Queues a sequence that begins with its parent's tokens, sharing the parent's blocks if the parent runs.

    Args:
      child: has at least one token more than are shared, and the shared ones equal the parent's.
      num_computed: tokens to share; None shares all that the parent computed. Rows that evict share all or none, and
        rows with states of recurrent layers none if no slot is left.
    """
    if eviction is not None and num_computed is None:
        eviction.evict_shared()
    if parent.row is not None and (eviction is None or num_computed is None):
        count = int(blocks.rows.num_computed[parent.row]) if num_computed is None else num_computed
        if states is None or (slot := states.share(parent.row, count)) is not None:
            held = share(blocks, parent.row, count)
            child.kv.shared = held if states is None else held._replace(state=slot)
            child.kv.share_index(parent.kv, count // blocks.memory.block_size)
    child.rank = parent.rank
    queue.add(child)


def fork_prompts(
    queue: WaitingQueue, blocks: RowBlocks, eviction: RowEviction | None, states: RowStates | None, rows: np.ndarray
) -> None:
    """Shares the blocks of computed prompts with the sequences that wait for them."""
    for leader in [seq for seq in queue.leaders if seq.row in rows]:
        # Each computes the last token again: a first token needs its logits.
        for seq in queue.pop_forks(leader):
            fork(queue, blocks, eviction, states, leader, seq, leader.num_prompt - 1)
        if states is not None and leader.row is not None:
            states.end_forks(leader.row)
