"""Masks of scores inside the prefill kernel: `patterns.Pattern`, one condition after the other.

Half of a consumer's registers hold the output and the scores. So numbers that can be read again are not kept,
remainders are per row or column and only for patterns that have them, and rare parts of patterns are separate branches.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.patterns import FAR


def masked_scores(s, pattern, positions):
    """Scores [R, C] with -inf where a query does not see a key, by `Pattern.visible`.

    Args:
      pattern, positions: functions that read the Pattern, and the text positions [R] and [C], where they are
        used.
    """

    def rows(x):
        return lax.broadcast_in_dim(x, s.shape, [0])

    def columns(x):
        return lax.broadcast_in_dim(x, s.shape, [1])

    def remainder(x, divisor):
        divisor = jnp.full(x.shape, divisor, jnp.int32).astype(jnp.uint32)  # unsigned ones need fewer registers
        return lax.rem(x.astype(jnp.uint32), divisor).astype(jnp.int32)

    def in_step(s):
        q_pos, kv_pos = positions()
        is_global = (pattern().has_global != 0) & (remainder(kv_pos, pattern().global_every) == 0)
        # Keys that are always seen are out of step for none.
        always = (kv_pos < pattern().num_sinks) | is_global
        phase = columns(jnp.where(always, -1, remainder(kv_pos, pattern().stride)))
        return jnp.where((phase == rows(remainder(q_pos, pattern().stride))) | (phase == -1), s, -jnp.inf)

    def with_globals(reach):
        return jnp.where(remainder(positions()[1], pattern().global_every) == 0, FAR, reach)

    def near(s):
        q_pos, kv_pos = positions()
        # Keys that are always seen have the position FAR for the window.
        reach = jnp.where(kv_pos < pattern().num_sinks, FAR, kv_pos)
        reach = lax.cond(pattern().has_global != 0, with_globals, lambda x: x, reach)
        return jnp.where(columns(reach) > rows(q_pos - pattern().window), s, -jnp.inf)

    s = lax.cond(pattern().stride != 1, in_step, lambda x: x, s)
    s = lax.cond(pattern().window < FAR, near, lambda x: x, s)
    q_pos, kv_pos = positions()
    return jnp.where(columns(kv_pos) <= rows(q_pos), s, -jnp.inf)


def scored_by(visit, num_sink_queries, pattern, positions, s):
    """Scores s [R, C] with -inf where another query scores a key, by `Pattern.repositioned`.

    Args:
      visit: 0 for the first query; j for sink query j - 1, the last of which serves all later sinks too.
      num_sink_queries: sink queries.
      pattern, positions: see `masked_scores`.
    """

    def repositioned(first, until):
        q_pos, kv_pos = positions()
        # Only the columns of these sinks; FAR is no sink.
        sink = jnp.where((kv_pos >= first) & (kv_pos < jnp.minimum(until, pattern().num_sinks)), kv_pos, FAR)
        # Where sink_position is 1 they are all sinks (no text is half as long as FAR), else those beyond both.
        beyond = jnp.maximum(pattern().window - 1, pattern().sink_ceiling)
        reach = q_pos - jnp.where(pattern().sink_position == 1, -FAR // 2, beyond)
        return lax.broadcast_in_dim(sink, s.shape, [1]) < lax.broadcast_in_dim(reach, s.shape, [0])

    def first_query(s):
        return jnp.where(repositioned(0, FAR), -jnp.inf, s)

    def second_query(s):
        return jnp.where(repositioned(visit - 1, jnp.where(visit == num_sink_queries, FAR, visit)), s, -jnp.inf)

    return lax.cond(visit == 0, first_query, second_query, s)
