"""Patterns in seven numbers: text positions that a query sees, and blocks that hold any of them. Works in jit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import mask
from pallas_kernels.mask import FAR


def _rem(x, divisor) -> jax.Array:
    """Computes the remainder of x >= 0 in one operation, which kernels can compile."""
    x = jnp.asarray(x, jnp.int32)
    return jax.lax.rem(x, jnp.broadcast_to(jnp.asarray(divisor, jnp.int32), x.shape))


class Pattern(NamedTuple):
    """An attention pattern: key j is seen by query i if j <= i and (near, or sink, or global):

      near    i - j < window and (i - j) % stride == 0
      sink    j < num_sinks
      global  has_global and j % global_every == 0

    Scalars, which may be traced. Where `sink_position` is 1, sinks are scored with a sink query, the same for all of
    them (StreamingLLM, arXiv:2309.17453, section 3.2); where it is 2, only sinks that are both outside the window and
    farther away than `sink_ceiling`, each with a separate sink query (LM-Infinite, arXiv:2308.16137, section 4).
    """

    window: Any = FAR
    num_sinks: Any = 0
    stride: Any = 1
    has_global: Any = 0
    global_every: Any = FAR
    sink_position: Any = 0
    sink_ceiling: Any = FAR

    def visible(self, q_pos, kv_pos):
        """True where a query sees a key; shapes broadcast. Keys at FAR are never seen."""
        return mask.visible(self, q_pos, kv_pos, _rem)

    def repositioned(self, q_pos, kv_pos):
        """True where a key is a repositioned sink, which a sink query scores; shapes broadcast."""
        return mask.repositioned(self, q_pos, kv_pos)

    def sees_some(self, first_query, last_query, starts, size: int) -> jax.Array:
        """True where any query at first_query..last_query sees any of `size` positions from `starts`; broadcasts."""
        ends = starts + size - 1
        nearest = jnp.maximum(first_query - ends, 0)
        farthest = jnp.minimum(last_query - starts, self.window - 1)
        # Stride 3, distances 4..5: the next multiple is 6, so none is seen.
        near = -(-nearest // self.stride) * self.stride <= farthest
        is_global = (self.has_global != 0) & ((-starts) % self.global_every < size)
        return (starts <= last_query) & (near | (starts < self.num_sinks) | is_global)

    def sees_all(self, first_query, last_query, starts, size: int) -> jax.Array:
        """True where every query at first_query..last_query sees each of `size` positions from `starts` with its own
        query: no mask is needed. False is always safe."""
        inside = (starts + size - 1 <= first_query) & (last_query - starts < self.window) & (self.stride == 1)
        return inside & ~((self.sink_position != 0) & (starts < self.num_sinks))


FULL = Pattern()
