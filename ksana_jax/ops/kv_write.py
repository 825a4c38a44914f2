"""The write of a step's keys and values into the pool: the contract, and the XLA reference."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.patterns import SINK_POSITIONS, PatternArrays
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.sealed_pool import SealedCache

CEILING = SINK_POSITIONS.index("ceiling")


class Queries(NamedTuple):
    """A step's queries, scaled and rotated.

    q: [T, N, H], rotated at their own positions. q_sink: rotated for repositioned sinks, in the form that the
      implementation reads; None where no sinks are repositioned.
    """

    q: jax.Array
    q_sink: jax.Array | None


def write(q, k, v, cache: KVCache, context: AttentionContext, angles, scale: float) -> tuple[Queries, KVCache]:
    """Rotates q [T, N, H] and k [T, K, H], stores k and v [T, K, H] at the batch's slots; without k, rotates q only.

    Args:
      angles: of the batch's positions, from `Rope.angles`. scale: factor of the queries.

    Returns:
      The queries, those for sinks [T, N, H] rotated at `sink_query_position` of sink 0; and the cache.
    """
    rope = context.rope
    unrotated = cache.unrotated_keys or (context.observer is not None and context.observer.unrotated_keys)
    k = k if k is None or unrotated else rope.rotate(k, angles)
    if isinstance(cache, SealedCache):
        cache = cache if k is None else _write_exactly(k, v, cache, context)
    elif k is not None:
        cache = cache.write(context.layer, context.batch.slots, k, v)
    q = q * scale
    q_sink = None
    if context.num_repositioned_sinks:
        q_sink = rope.rotate(q, rope.angles(sink_query_position(context.pattern, context.batch.positions, 0)))
    return Queries(rope.rotate(q, angles), q_sink), cache


def _write_exactly(k, v, cache: SealedCache, context: AttentionContext) -> SealedCache:
    """Stores k and v [T, K, H], and encodes the blocks that are full now."""
    assert context.residual is not None
    for x, (at, batch) in zip((k, v), context.residual, strict=True):
        cache = cache.write_side(at, batch.slots, x)
    (k_at, k_batch), (v_at, v_batch) = context.residual
    exact = k_batch.full_blocks, v_batch.full_blocks
    return cache.seal(context.layer, (k_at, v_at), context.batch.full_blocks, exact, context.features)


def sink_query_position(pattern: PatternArrays, positions, sink):
    """Returns the positions from which queries look at a repositioned sink; shapes broadcast.

    StreamingLLM has one position for all sinks, LM-Infinite one at `sink_ceiling` from each. If the keys of all
    sinks are rotated back to position 0, it is sink 0's.
    """
    in_cache = jnp.minimum(positions, pattern.num_sinks + pattern.window - 1)
    return jnp.where(pattern.sink_position == CEILING, pattern.sink_ceiling + sink, in_cache)
