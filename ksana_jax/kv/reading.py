"""The bytes of KV that a query reads, and that hidden tokens would free. Knows the layout of blocks; no requests."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.layout import HIDDEN, INDEX_KEY, SUMMARY, KVLayout
from ksana_jax.kv.selection.base import SelectionMethod


def read_bytes(layout: KVLayout, num_tokens: int, num_blocks: int) -> int:
    """Returns the bytes that a query reads of the blocks of its sequence: all of them or, in layers that select, the
    selected ones and the summaries, or an indexer's keys, of all. Keys that several layers share are read by each.

    Args:
      num_tokens: of its sequence. num_blocks: that hold them, in all groups of layers.
    """
    summary = sum(leaf.nbytes for leaf in layout.leaves if leaf.name in (SUMMARY, INDEX_KEY))
    whole = layout.block_bytes - summary
    layers = [at for at in range(len(layout.places)) if layout.states is None or at not in layout.states.layers]
    if layout.selection is None:
        return num_blocks * whole * len(layers) // len({layout.places[layer] for layer in layers})
    size = layout.block_size

    def read(method: SelectionMethod | None, held: int) -> int:
        chosen = held * size if method is None else method.num_tokens(size)
        return held * whole if chosen >= held * size else chosen * whole // size + held * summary

    held = [group.live.num_live_blocks(size, num_tokens) for group in layout.groups]
    of_layers = (read(layout.selects_in[layer], held[layout.places[layer][0]]) for layer in layers)
    return sum(of_layers) // len(layout.groups[0].layers)


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
