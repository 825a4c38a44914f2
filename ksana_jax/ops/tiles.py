"""Tiles of queries, each with the block table of its row. Knows positions; no pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ksana_jax.core.patterns import FAR


class Tiles(NamedTuple):
    """Tiles of Q queries, each with its own block table; or one value for each of these arrays.

    q, q_sink: [S, Q, N, H]; no q_sink where no sinks are repositioned. positions: [S, Q] in the cache. text_positions,
    numbers: [S, Q], for an observer. tables: [S, P], or [S, P, 2], see `Source`. starts: [S, P]. ancestors: [S, Q] of
    trees, see `StepArrays`; else None. log_total: [S, Q, N] logarithm of the softmax's denominator, if it is known.
    """

    q: Any
    q_sink: Any
    positions: Any
    text_positions: Any
    numbers: Any
    tables: Any
    starts: Any
    ancestors: Any = None
    log_total: Any = None

    def nodes(self, slot_positions):
        """Returns the index in their tile of the tokens in slots [S, C] at some positions; negative before its
        first."""
        return slot_positions - self.positions[:, :1]

    def key_positions(self, slot_positions):
        """Returns the positions [S, C] of the keys in slots; tree nodes take their queries' position."""
        if self.ancestors is None:
            return slot_positions
        nodes, last = self.nodes(slot_positions), self.positions.shape[1] - 1
        of_nodes = jnp.take_along_axis(self.positions, jnp.clip(nodes, 0, last), axis=1)
        used = (nodes <= last) & (of_nodes >= 0)
        return jnp.where(nodes < 0, slot_positions, jnp.where(used, of_nodes, FAR))

    def on_the_way(self, slot_positions):
        """Returns whether slots hold tokens before the tree, or on the way to each query: [S, Q, C]."""
        nodes = self.nodes(slot_positions)[:, None]
        bits = jnp.right_shift(self.ancestors[:, :, None], jnp.clip(nodes, 0, 31)) & 1
        return (nodes < 0) | (bits == 1)

    def slots_end(self, end):
        """Returns the positions [S] after the last slots that hold tokens. end: see `Source`."""
        newest = self.positions.max(axis=1)
        if self.ancestors is not None:
            newest = jnp.where(newest < 0, newest, self.positions[:, 0] + (self.positions >= 0).sum(axis=1) - 1)
        return end(newest)


PADDING = Tiles(
    q=0, q_sink=0, positions=-1, text_positions=-1, numbers=0, tables=0, starts=FAR, ancestors=0, log_total=-np.inf
)
