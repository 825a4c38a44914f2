"""The bytes of KV that a query reads, and that hidden tokens would free. Knows the layout of blocks; no requests."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.layout import HIDDEN, SUMMARY, KVLayout


def read_bytes(layout: KVLayout, num_blocks: int) -> int:
    """Returns the bytes that a query reads of the num_blocks blocks of its text: all of them or, in layers that select,
    the selected ones and the summaries of all. Keys that several layers share are read by each."""
    summary = sum(leaf.nbytes for leaf in layout.leaves if leaf.name == SUMMARY)
    whole = layout.block_bytes - summary
    num_layers, num_stored = len(layout.places), len(set(layout.places))
    if layout.selection is None or (chosen := layout.selection.num_blocks(layout.block_size)) >= num_blocks:
        return num_blocks * whole * num_layers // num_stored
    selecting = num_layers - layout.selects_in.count(None)
    of_selecting = chosen * whole + num_blocks * summary
    return (of_selecting * selecting + num_blocks * whole * (num_layers - selecting)) // num_stored


def simulated_bytes(layout: KVLayout, length: int, num_context: int) -> int:
    """Returns the bytes of the blocks that a row of length tokens would hold if the memory of its hidden tokens were
    freed; heads that keep different numbers count as if each kept the mean.

    Args:
      num_context: tokens of its prompt before a question.
    """
    assert layout.eviction is not None
    evicted = layout.eviction.num_evicted(np.array([length]), np.array([num_context]))[:, 0].tolist()
    of_block = sum(leaf.nbytes for leaf in layout.leaves if leaf.name != HIDDEN)
    size = layout.block_size
    held = (
        group.live.num_live_blocks(size, length) if group.share is None else -(-(length - gone) // size)
        for group, gone in zip(layout.groups, evicted, strict=True)
    )
    return of_block * sum(held)
