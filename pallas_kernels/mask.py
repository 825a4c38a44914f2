"""Defines the keys that a query sees, and which of them are repositioned sinks. For NumPy and jax alike; no jax.

`Pattern` of the kernels and the engine's patterns have these numbers and compute this. Masks that a kernel computes in
another way, for its registers, are tested to be equal to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

# Stands for "no limit" in integer arrays; twice it still fits in int32.
FAR = 2**30


def visible(pattern: Any, q_pos, kv_pos, remainder: Callable[[Any, Any], Any] = operator.mod):
    """True where a query sees a key: boolean, shapes broadcast. Keys at or beyond FAR are never seen.

    Args:
      pattern: numbers, see `patterns.Pattern`; arrays broadcast too.
      remainder: of a number and a positive one; if the first is negative, the result does not matter.
    """
    distance = q_pos - kv_pos
    near = (distance < pattern.window) & (remainder(distance, pattern.stride) == 0)
    is_global = (pattern.has_global != 0) & (remainder(kv_pos, pattern.global_every) == 0)
    return (distance >= 0) & (near | (kv_pos < pattern.num_sinks) | is_global)


def repositioned(pattern: Any, q_pos, kv_pos):
    """True where a key is a sink that a query scores from elsewhere than its own position; shapes broadcast.

    If `sink_position` is 1 these are all sinks, if it is 2 the sinks beyond both the window and `sink_ceiling`.
    """
    distance = q_pos - kv_pos
    beyond = (distance >= pattern.window) & (distance > pattern.sink_ceiling)
    return (kv_pos < pattern.num_sinks) & ((pattern.sink_position == 1) | ((pattern.sink_position == 2) & beyond))
