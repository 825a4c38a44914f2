"""A vocabulary divided among devices: sampling exchanges candidates, never the scores of all ids."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ksana_jax.sampling.sampler import GROUP
from ksana_jax.sampling.vocabulary import Vocabulary, largest
from ksana_jax.sharding.shares import local_vocabulary
from ksana_jax.sharding.specs import AXIS


@dataclasses.dataclass(frozen=True)
class DividedVocabulary(Vocabulary):
    """The contract of `Vocabulary` inside a program of several devices, which have rising ids.

    num_ids: V. num_devices: that divide them.
    """

    num_ids: int
    num_devices: int

    @property
    def _local(self) -> int:
        return local_vocabulary(self.num_ids, self.num_devices)

    @property
    def _first(self) -> jax.Array:
        """The first id of this device."""
        return jax.lax.axis_index(AXIS) * self._local

    def size(self, scores_SV: jax.Array) -> int:
        return self.num_ids

    def _part(self, x: jax.Array, size: int, first: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, size * self.num_devices - x.shape[1])))
        return jax.lax.dynamic_slice_in_dim(padded, first, size, axis=1)

    def own(self, x_SV: jax.Array) -> jax.Array:
        return self._part(x_SV, self._local, self._first)

    def without_padding(self, scores_SV: jax.Array) -> jax.Array:
        return jnp.where(self._first + jnp.arange(self._local) < self.num_ids, scores_SV, -jnp.inf)

    def num_groups(self, scores_SGW: jax.Array) -> int:
        return -(-self.num_ids // GROUP)

    def own_groups(self, x_SG: jax.Array) -> jax.Array:
        size = self._local // GROUP
        return self._part(x_SG, size, jax.lax.axis_index(AXIS) * size)

    def sum(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, AXIS)

    def max(self, x: jax.Array) -> jax.Array:
        return jnp.max(jax.lax.all_gather(x, AXIS), axis=0)  # NaN stays NaN

    def min(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmin(x, AXIS)

    def best(self, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids, values = (jax.lax.all_gather(x, AXIS) for x in (ids + self._first, values))
        # The first of equal values wins, and NaN counts as the largest.
        chosen = jnp.argmax(values, axis=0)[None]
        found_ids, found_values = (jnp.take_along_axis(x, chosen, axis=0)[0] for x in (ids, values))
        return found_ids, found_values

    def top(self, x_SV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        values, ids = largest(x_SV, min(count, self._local))
        if not count:  # XLA gathers nothing that is empty
            return values, ids
        values, ids = (jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (values, ids + self._first))
        values, at = jax.lax.top_k(values, count)
        return values, jnp.take_along_axis(ids, at, axis=1)

    def pick(self, x_SV: jax.Array, ids: jax.Array) -> jax.Array:
        at = ids - self._first
        here = (at >= 0) & (at < self._local)
        found = jnp.take_along_axis(x_SV, jnp.where(here, at, 0)[:, None], axis=-1)
        # A score of -inf has to stay one: no products.
        return jax.lax.psum(jnp.where(here[:, None], found, 0.0), AXIS)
