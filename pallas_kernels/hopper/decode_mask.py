"""Masks of 64 x 64 scores inside a Hopper kernel: `patterns.Pattern`, with all that is not a comparison done per row or
column. Remainders and flags of a column cost a quarter of the registers that they would cost for each score."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import ROWS
from pallas_kernels.patterns import FAR, Pattern
from pallas_kernels.work import TILE_KV

SHAPE = (ROWS, TILE_KV)


def _rows(x):
    return lax.broadcast_in_dim(x, SHAPE, [0])


def _columns(x):
    return lax.broadcast_in_dim(x, SHAPE, [1])


def _remainder(x, divisor):
    return lax.rem(x, jnp.full(x.shape, divisor, jnp.int32))


def visible(pattern: Pattern, q_pos, kv_pos):
    """`Pattern.visible` of q_pos [64] (rows) and kv_pos [64] (columns): boolean [64, 64]."""
    is_global = (pattern.has_global != 0) & (_remainder(kv_pos, pattern.global_every) == 0)
    always = (kv_pos < pattern.num_sinks) | is_global
    # Keys that are always seen stand at FAR for the window, and out of step for none.
    near = _columns(jnp.where(always, FAR, kv_pos)) > _rows(q_pos - pattern.window)
    phase = _columns(jnp.where(always, -1, _remainder(kv_pos, pattern.stride)))
    in_step = (phase == _rows(_remainder(q_pos, pattern.stride))) | (phase == -1)
    return (_columns(kv_pos) <= _rows(q_pos)) & near & in_step


def repositioned(pattern: Pattern, q_pos, kv_pos):
    """`Pattern.repositioned` of q_pos [64] (rows) and kv_pos [64] (columns): boolean [64, 64]."""
    # Where sink_position is 1 they are all sinks (no text is half as long as FAR), else those beyond both.
    reach = jnp.where(pattern.sink_position == 1, -FAR // 2, jnp.maximum(pattern.window - 1, pattern.sink_ceiling))
    sink = jnp.where((kv_pos < pattern.num_sinks) & (pattern.sink_position != 0), kv_pos, FAR)
    return _columns(sink) < _rows(q_pos - reach)
