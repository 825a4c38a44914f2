"""The attention weights that cached tokens receive, which methods of eviction add up. Knows no blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.devices.features import Features
from ksana_jax.kv.eviction.base import EvictionMethod, Observation
from ksana_jax.models.rope import Rope


class AttentionObserver(NamedTuple):
    """Makes attention in a layer return the weights that slots receive, for an eviction method.

    Layers with an observer attend to all of their text: no pattern, no shared prefix.

    layer: index in the model. own_kv: whether the keys and values are its own; else another layer's queries alone
      decide which of them stay.
    """

    method: EvictionMethod
    layer: int | jax.Array
    own_kv: bool = True

    @property
    def observes(self) -> bool:
        """True if the method adds up the weights that this layer's queries give."""
        return self.method.observes and self.own_kv

    @property
    def unrotated_keys(self) -> bool:
        """True if keys are stored before the rotation, and rotated by their index in the cache when they are read."""
        return self.method.positions == "cache"

    def key_rope(self, rope: Rope, num_slots: int) -> tuple[jax.Array, jax.Array] | None:
        """Returns cosines and sines [C, H/2], with the rope's scale, for unrotated keys in C slots; or None."""
        if not self.unrotated_keys:
            return None
        cos, sin = rope.angles(jnp.arange(num_slots))
        return cos * rope.scale, sin * rope.scale


class ObservedQueries(NamedTuple):
    """Queries of S tiles, R = query heads of a kv head x Q tokens; arrays of tokens are [S, Q].

    text_positions: of the text; -1 for padding. numbers: see `EvictionMethod.query_numbers`; None if there are none.
    log_total: [S, K, R] logarithm of the softmax's denominator, -inf where a query sees nothing.
    """

    text_positions: Any
    numbers: Any
    log_total: jax.Array

    def rows(self, x: jax.Array) -> jax.Array:
        """Repeats [S, Q] values for the query heads of a kv head: [S, 1, R, 1]."""
        return jnp.tile(x, (1, self.log_total.shape[2] // x.shape[1]))[:, None, :, None]


class Pieces(NamedTuple):
    """Pieces of block tables, which are processed one after the other.

    count: of pieces with visible keys, traced. most: of all. num_tokens: in each. features: operations that programs
    may use on the device.
    """

    count: Any
    most: int
    num_tokens: int
    features: Features


def observed_mass(
    observer: AttentionObserver, queries: ObservedQueries, scores_of: Callable, pieces: Pieces
) -> jax.Array:
    """Returns the weight [S, K, pieces.most * pieces.num_tokens] of each slot, the sum or the largest of the queries of
    a tile and the query heads of a kv head, in float32; or [S, X, K, ...] with several `EvictionMethod.num_scores`.

    Args:
      scores_of: piece -> (scores [S, K, R, C], -inf where not visible; cache positions [S, C] of its slots).
    """
    method = observer.method
    s, kv_heads, rows = queries.log_total.shape
    group = rows // queries.text_positions.shape[1]
    head = jnp.arange(kv_heads)[:, None] * group + jnp.arange(rows) // queries.text_positions.shape[1]
    numbers = None if queries.numbers is None else queries.rows(queries.numbers)

    def logits_of(i):
        logits, slots = scores_of(i)
        if not method.custom_logits:
            return logits
        seen = Observation(
            observer.layer, head[..., None], queries.rows(queries.text_positions), slots[:, None, None, :], numbers
        )
        return jnp.where(jnp.isfinite(logits), method.observed_logits(logits, seen, jnp), -jnp.inf)

    log_total = queries.log_total
    if method.custom_logits:
        nothing = jnp.full(log_total.shape, -jnp.inf)

        def add(i, total):
            return jnp.logaddexp(total, jax.nn.logsumexp(logits_of(i), axis=-1))

        log_total = pieces.features.loop(pieces.count, pieces.most, add, nothing)
    base = jnp.where(jnp.isfinite(log_total), log_total, jnp.inf)[..., None]
    factor = 1.0 if numbers is None else method.query_factor(numbers)

    def weigh(i, mass):
        weights = jnp.exp(logits_of(i) - base) * factor
        if num_sums == 1:
            added = getattr(weights, method.score_reduction)(axis=2)
        else:
            added = jnp.moveaxis(method.observed(weights.reshape(s, kv_heads, group, -1, weights.shape[3]), jnp), 0, 1)
        return jax.lax.dynamic_update_slice_in_dim(mass, added, i * pieces.num_tokens, axis=mass.ndim - 1)

    num_sums = method.num_scores(group)
    sums = () if num_sums == 1 else (num_sums,)
    mass = jnp.zeros((s, *sums, kv_heads, pieces.most * pieces.num_tokens), jnp.float32)
    return pieces.features.loop(pieces.count, pieces.most, weigh, mass)


def joined_masses(
    method: EvictionMethod, masses: Sequence[jax.Array], starts: Sequence[jax.Array], block_size: int
) -> jax.Array:
    """Returns the weights of the slots of the first tables, whose blocks begin at 0, B, ..., from those of slots of all
    tables: [S, K, P*B] or [S, X, K, P*B].

    Args:
      starts: [S, P] cache positions of the blocks in each of the tables.
    """
    update = "max" if method.score_reduction == "max" else "add"
    joined, *others = (x.reshape(*x.shape[:-1], -1, block_size) for x in masses)
    for mass, at in zip(others, starts[1:], strict=True):
        add = jax.vmap(lambda x, at, more: getattr(x.at[..., at, :], update)(more, mode="drop"))
        joined = add(joined, at // block_size, mass)
    return joined.reshape(masses[0].shape)
