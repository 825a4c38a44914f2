"""Paged attention: the contract, the XLA reference that everything else is held to, and the choice of implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.kv.cache import KVCache
from ksana_jax.kv.patterns import SINK_POSITIONS, PatternArrays
from ksana_jax.models.rope import Rope
from ksana_jax.step import StepArrays, StepShape

CACHE, CEILING = SINK_POSITIONS.index("cache"), SINK_POSITIONS.index("ceiling")


def ragged_paged_attention(
    q: jax.Array,
    q_sink: jax.Array | None,
    cache: KVCache,
    layer: int,
    batch: StepArrays,
    shape: StepShape,
    pattern: PatternArrays,
    rope: Rope,
    sink_width: int,
) -> jax.Array:
    """Attends each packed token to the cached slots of its own row. XLA reference.

    Args:
      q: [T, N, H], rotated at its own position and scaled; N is a multiple of the cache's K.
      q_sink: [T, N, H], rotated at `sink_query_positions`, for sinks that are seen from elsewhere; None if sink_width is 0.
      cache: keys and values of all layers, keys rotated at their text positions; this step's tokens are already written.
      layer: index in [0, L).
      batch: block tables and positions, see `step.StepArrays`.
      pattern: which text positions a query sees, this layer's numbers.
      sink_width: how many leading entries of a block table can hold sinks that are seen from elsewhere.

    Returns:
      [T, N, H] in float32. Padding tokens (position -1) give zeros. Slots that no query sees may hold anything.

    Source: PagedAttention, arXiv:2309.06180, section 4; sinks seen from other positions, StreamingLLM
    (arXiv:2309.17453, section 3.2) and LM-Infinite (arXiv:2308.16137, section 4): keys stay rotated where they are
    and the query is rotated a second time, so that blocks never change.
    """
    d, tiles, size = shape.num_singles, shape.num_tiles, shape.query_tile
    parts = []
    for start, count, width in ((0, d, 1), (d, tiles, size)):
        if not count:
            continue
        # Singles occupy tables [0, D), tiles tables [D, S).
        tokens, tables = slice(start, start + count * width), slice(start, start + count)
        tiled = [
            None if x is None else x[tokens].reshape(count, width, *x.shape[1:]) for x in (q, q_sink, batch.positions)
        ]
        out = _attend_tiles(
            tiled[0], tiled[1], tiled[2], cache, layer, batch.block_tables[tables], batch.block_starts[tables],
            pattern, rope, sink_width,
        )  # fmt: skip
        parts.append(out.reshape(count * width, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _attend_tiles(q_SQNH, q_sink_SQNH, positions_SQ, cache, layer, tables_SP, starts_SP, pattern, rope, sink_width):
    s, width, n, h = q_SQNH.shape
    block_size = cache.block_size
    k_SKCH, v_SKCH = cache.read(layer, tables_SP)
    kv_heads = k_SKCH.shape[1]
    kv_pos_SC = (starts_SP[:, :, None] + jnp.arange(block_size)).reshape(s, -1)

    # Slots beyond a tile's last token may hold another row's values; a weight of zero does not silence a NaN there.
    written_SC = kv_pos_SC <= positions_SQ.max(axis=1, keepdims=True)
    v_SKCH = jnp.where(written_SC[:, None, :, None], v_SKCH, 0)

    def scores(queries, keys):
        grouped = queries.reshape(s, width, kv_heads, n // kv_heads, h).astype(keys.dtype)
        return jnp.einsum("SQKGH,SKCH->SKGQC", grouped, keys, preferred_element_type=jnp.float32)

    scores_SKGQC = scores(q_SQNH, k_SKCH)
    distance_SQC = positions_SQ[:, :, None] - kv_pos_SC[:, None, :]
    if sink_width:
        c = sink_width * block_size
        sink_pos_SC = kv_pos_SC[:, :c]
        # "ceiling" wants the distance to be the same for all sinks: keys are turned back to position 0 (un-rotated).
        back = jnp.where(pattern.sink_position == CEILING, -sink_pos_SC, 0)
        k_sink = rope.rotate_further(jnp.moveaxis(k_SKCH[:, :, :c], 1, 2), rope.angles(back))
        elsewhere = scores(q_sink_SQNH, jnp.moveaxis(k_sink, 2, 1))
        moved = sinks_seen_from_elsewhere(pattern, distance_SQC[..., :c], sink_pos_SC[:, None, :])
        head = jnp.where(moved[:, None, None], elsewhere, scores_SKGQC[..., :c])
        scores_SKGQC = jnp.concatenate([head, scores_SKGQC[..., c:]], axis=-1)

    visible_SQC = pattern.visible(positions_SQ[:, :, None], kv_pos_SC[:, None, :])
    scores_SKGQC = jnp.where(visible_SQC[:, None, None], scores_SKGQC, -jnp.inf)
    top = jnp.max(scores_SKGQC, axis=-1, keepdims=True)
    # A query that sees nothing (padding) has weights of exp(-inf) = 0 and a sum of 0.
    weights = jnp.exp(scores_SKGQC - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(v_SKCH.dtype)
    out = jnp.einsum("SKGQC,SKCH->SQKGH", weights, v_SKCH, preferred_element_type=jnp.float32)
    return out.reshape(s, width, n, h)


def sink_query_positions(pattern: PatternArrays, positions: jax.Array) -> jax.Array:
    """Where queries at positions [...] stand when they look at sinks that are seen from elsewhere."""
    in_cache = jnp.minimum(positions, pattern.num_sinks + pattern.window - 1)
    return jnp.where(pattern.sink_position == CEILING, pattern.sink_ceiling, in_cache)


def sinks_seen_from_elsewhere(pattern: PatternArrays, distance: jax.Array, kv_pos: jax.Array) -> jax.Array:
    """Which keys are sinks that the query does not see from its own position: boolean, shapes broadcast."""
    beyond = (distance >= pattern.window) & (distance > pattern.sink_ceiling)
    moved = (pattern.sink_position == CACHE) | ((pattern.sink_position == CEILING) & beyond)
    return (kv_pos < pattern.num_sinks) & moved


class Implementation(NamedTuple):
    """An implementation of `ragged_paged_attention`'s contract; `missing` says why it cannot run on a platform, or None."""

    name: str
    attend: Callable[..., jax.Array]
    missing: Callable[[str], str | None]


# In order of preference; the reference runs everywhere and stays last.
IMPLEMENTATIONS = (Implementation("xla", ragged_paged_attention, lambda platform: None),)


def choose(platform: str) -> Implementation:
    """The first implementation that runs on a platform ("cpu", "gpu", "tpu", ...)."""
    return next(i for i in IMPLEMENTATIONS if i.missing(platform) is None)


def explain(platform: str | None = None) -> list[tuple[str, bool, str]]:
    """For each implementation of paged attention: its name, whether it is the one used, and why (not)."""
    platform = platform or jax.default_backend()
    chosen = choose(platform)
    rows = []
    for i in IMPLEMENTATIONS:
        reason = i.missing(platform) or ("preferred on " + platform if i is chosen else f"{chosen.name} is preferred")
        rows.append((i.name, i is chosen, reason))
    return rows
