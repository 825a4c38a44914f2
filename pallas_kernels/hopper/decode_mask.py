"""Masks of scores inside a Hopper kernel: `patterns.Pattern`, with all that is not a comparison done per query or key.
Remainders and flags of a key cost a quarter of the registers that they would cost for each of 64 x 64 scores."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.patterns import FAR, Pattern


class Axes(NamedTuple):
    """The axis of a matrix of scores that counts queries, and the one that counts keys."""

    query: int
    key: int

    def spread(self, q_pos, kv_pos):
        """Functions that repeat each query's, and each key's, values for all scores."""
        sizes = {self.query: len(q_pos), self.key: len(kv_pos)}
        shape = sizes[0], sizes[1]

        def of_query(x):
            return lax.broadcast_in_dim(x, shape, [self.query])

        def of_key(x):
            return lax.broadcast_in_dim(x, shape, [self.key])

        return of_query, of_key


STRAIGHT, SWAPPED = Axes(0, 1), Axes(1, 0)


def _remainder(x, divisor):
    return lax.rem(x, jnp.full(x.shape, divisor, jnp.int32))


def visible(pattern: Pattern, q_pos, kv_pos, axes: Axes = STRAIGHT):
    """`Pattern.visible` of q_pos [Q] and kv_pos [T]: boolean [Q, T], or [T, Q] where swapped."""
    of_query, of_key = axes.spread(q_pos, kv_pos)
    is_global = (pattern.has_global != 0) & (_remainder(kv_pos, pattern.global_every) == 0)
    always = (kv_pos < pattern.num_sinks) | is_global
    # Keys that are always seen have the position FAR for the window, and are out of step for none.
    near = of_key(jnp.where(always, FAR, kv_pos)) > of_query(q_pos - pattern.window)
    phase = of_key(jnp.where(always, -1, _remainder(kv_pos, pattern.stride)))
    in_step = (phase == of_query(_remainder(q_pos, pattern.stride))) | (phase == -1)
    return (of_key(kv_pos) <= of_query(q_pos)) & near & in_step


def repositioned(pattern: Pattern, q_pos, kv_pos, axes: Axes = STRAIGHT):
    """`Pattern.repositioned` of q_pos [Q] and kv_pos [T]: boolean [Q, T], or [T, Q] where swapped."""
    of_query, of_key = axes.spread(q_pos, kv_pos)
    # Where sink_position is 1 they are all sinks (no text is half as long as FAR), else those beyond both.
    reach = jnp.where(pattern.sink_position == 1, -FAR // 2, jnp.maximum(pattern.window - 1, pattern.sink_ceiling))
    sink = jnp.where((kv_pos < pattern.num_sinks) & (pattern.sink_position != 0), kv_pos, FAR)
    return of_key(sink) < of_query(q_pos - reach)
