"""The sampling functions' view of scores: here one device has the whole vocabulary."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ksana_jax.devices.features import ALL_FEATURES, Features


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Relates the scores [S, V] that a function gets to the whole vocabulary: here they are all of it.

    `sharding.vocabulary` has the one of several devices, each with some ids of each row. Later results are then
    the same on all of them.

    features: operations that programs may use on the devices.
    """

    features: Features = dataclasses.field(default=ALL_FEATURES, kw_only=True)

    def size(self, scores_SV: jax.Array) -> int:
        """Returns how many ids there are on all devices."""
        return scores_SV.shape[-1]

    def own(self, x_SV: jax.Array) -> jax.Array:
        """Selects this device's part of numbers for the whole vocabulary."""
        return x_SV

    def without_padding(self, scores_SV: jax.Array) -> jax.Array:
        """Returns scores with -inf for ids beyond the vocabulary."""
        return scores_SV

    def num_groups(self, scores_SGW: jax.Array) -> int:
        """Returns how many groups of neighbours the vocabulary has."""
        return scores_SGW.shape[1]

    def own_groups(self, x_SG: jax.Array) -> jax.Array:
        """Selects this device's part of numbers for all groups."""
        return x_SG

    def sum(self, x: jax.Array) -> jax.Array:
        """Sums the devices' results over their ids."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over devices; NaN if any value is NaN."""
        return x

    def min(self, x: jax.Array) -> jax.Array:
        """Returns the minimum over devices."""
        return x

    def best(self, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the devices' candidate [S], id and value, with the largest value; the lowest id
        among equals."""
        return ids, values

    def top(self, x_SV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Returns the largest numbers of each row [S, count], descending, and their ids."""
        return largest(x_SV, count)

    def pick(self, x_SV: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the numbers [S, 1] of given ids [S]."""
        return jnp.take_along_axis(x_SV, ids[:, None], axis=-1)


# Width of groups in `largest`. The largest 256 of 131,072 numbers are found among 4,096 maxima and 8,192 numbers.
SEARCHED_TOGETHER = 32


def largest(x_SV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Equals `jax.lax.top_k`: returns the largest numbers of each row [S, count], descending, and their ids; of
    equal numbers the lowest ids. Undefined for rows with NaN.

    Sorts only the groups of neighbours with the largest maxima, which hold all of them.
    """
    rows, width = x_SV.shape
    num_groups = -(-width // SEARCHED_TOGETHER)
    if num_groups <= 2 * count:
        values, ids = jax.lax.top_k(x_SV, count)
        return values, ids
    padded = jnp.pad(x_SV, ((0, 0), (0, -width % SEARCHED_TOGETHER)), constant_values=-jnp.inf)
    groups_SGW = padded.reshape(rows, num_groups, SEARCHED_TOGETHER)
    # Sorted by id, so that the lowest id comes first among equal scores.
    groups = jnp.sort(jax.lax.top_k(jnp.max(groups_SGW, axis=-1), count)[1], axis=-1)
    found = jnp.take_along_axis(groups_SGW, groups[:, :, None], axis=1, mode="clip").reshape(rows, -1)
    values, at = jax.lax.top_k(found, count)
    group = jnp.take_along_axis(groups, at // SEARCHED_TOGETHER, axis=-1, mode="clip")
    return values, group * SEARCHED_TOGETHER + at % SEARCHED_TOGETHER


WHOLE = Vocabulary()
