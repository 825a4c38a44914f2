"""The bytes of KV that a query reads. Knows the layout of blocks; no requests."""

from __future__ import annotations

from ksana_jax.kv.layout import SUMMARY, KVLayout


def read_bytes(layout: KVLayout, num_blocks: int) -> int:
    """Returns the bytes that a query reads of the num_blocks blocks of its text: all of them or, in layers that select,
    the selected ones and the summaries of all."""
    summary = sum(leaf.nbytes for leaf in layout.leaves if leaf.name == SUMMARY)
    whole = layout.block_bytes - summary
    if layout.selection is None or (chosen := layout.selection.num_blocks(layout.block_size)) >= num_blocks:
        return num_blocks * whole
    num_layers = len(layout.places)
    selecting = num_layers - layout.selects_in.count(None)
    of_selecting = chosen * whole + num_blocks * summary
    return (of_selecting * selecting + num_blocks * whole * (num_layers - selecting)) // num_layers
