"""Evictions by methods that read more than a row's cached tokens: numbers about the model, and what queries have added
to the row's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import line_of, name_of
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod, Merged
from ksana_jax.kv.layout import STATE, KVLayout
from ksana_jax.kv.moves import Evictions
from ksana_jax.models.params import Params
from ksana_jax.models.rope import Rope
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.weight_packing import numbers


class Facts(NamedTuple):
    """Facts about layers that a method reads. constants: [Gk, Lg, ...] by name. outputs: [Gk, Lg, N, H, D], or None."""

    constants: Mapping[str, Any]
    outputs: Any = None


def facts_of(params: Params, layout: KVLayout, ropes: Sequence[Rope]) -> Facts:
    """Returns what the layout's eviction method reads.

    Raises:
      ConfigError: the method has numbers for another number of layers.
    """
    assert layout.eviction is not None
    method = layout.eviction.method
    # The last groups of a kind may have fewer layers.
    layers = np.zeros((len(layout.groups), len(layout.groups[0].layers)), np.int32)
    for group, row in zip(layout.groups, layers, strict=True):
        if not group.residual:
            row[: len(group.layers)] = group.layers
    layers //= layout.eviction.heads_apart
    found, num_layers = dict(method.constants()), len(layout.places) // layout.eviction.heads_apart
    for name, x in found.items():
        if len(x) != num_layers:
            raise ConfigError(
                f"kv_eviction {type(method).__name__}: {name} is of {len(x)} layers, the model has {num_layers}"
            )
    if method.reads_ropes:
        frequencies = np.array([rope.inv_freq for rope in ropes], np.float32)
        scales = [np.broadcast_to(rope.scale, frequencies.shape[1:]) for rope in ropes]
        found |= {"inv_freq": frequencies, "rope_scale": np.array(scales, np.float32)}
    constants = {name: jnp.asarray(x[layers]) for name, x in found.items()}
    if not method.reads_outputs:
        return Facts(constants)
    size = 2 * len(ropes[0].inv_freq)
    outputs = [numbers(p.w_o).T.reshape(-1, size, p.w_o.shape[0]) for p in params.layers]
    return Facts(constants, jnp.stack(outputs)[layers])


class StatisticsEviction:
    """An eviction method whose `priority` also reads facts about the layers, and the states of rows.

    state: [n, Lg, K, *state_shape], or None; after `merge`, the new one.
    is_nan: [n, Lg, 1, K] after `priority`, whether that of a token that may go is NaN.
    """

    is_nan: jax.Array

    def __init__(self, method: EvictionMethod, facts: Facts, state: jax.Array | None):
        self._method, self._facts, self.state = method, facts, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def priority(self, cached: Cached, xp: Any) -> Array:
        found = self._call("priority", cached, xp)
        slots = xp.arange(cached.keys.shape[3])
        first, end = (x[:, None, None, None] for x in (cached.num_sinks, cached.num_tokens - cached.num_recent))
        is_nan = xp.isnan(found) & (first <= slots) & (slots < end)
        self.is_nan = xp.broadcast_to(is_nan.any(axis=3), cached.keys.shape[:3])[:, :, None]
        return found

    def merge(self, cached: Cached, stays: Array, xp: Any) -> Merged:
        found = self._call("merge", cached, stays, xp)
        for name, x in (("into", found.into), ("weights", found.weights)):
            if x.shape != stays.shape:
                name = f"kv_eviction {name_of(type(self._method))}: merge returns {name} of shape {x.shape}"
                raise ConfigError(f"{name}, must be {stays.shape} (rows, layers, KV heads, tokens)")
        self.state = self.state if found.state is None else found.state
        return found

    def low_factors(self, cached: Cached, xp: Any) -> Array:
        self.state = self._call("low_factors", cached, xp)
        return self.state

    def measure(self, cached: Cached, xp: Any) -> Array:
        found, shape = self._call("measure", cached, xp), cached.keys.shape[:3]
        if found.shape[:3] != shape:
            name = f"kv_eviction {name_of(type(self._method))}: measure returns shape {found.shape}"
            raise ConfigError(f"{name}, must begin with {shape} (rows, layers, KV heads)")
        return found

    def _call(self, name: str, cached: Cached, *arguments: Any) -> Any:
        """Calls a method of the eviction method with all that it reads.

        Raises:
          ConfigError: it raised an error.
        """
        constants = {name: x[cached.group] for name, x in self._facts.constants.items()}
        norms = None if self._facts.outputs is None else output_norms(cached, self._facts.outputs)
        cached = cached._replace(constants=constants, state=self.state, output_norms=norms)
        try:
            return getattr(self._method, name)(cached, *arguments)
        except Exception as error:  # whatever a user's method may raise
            method, (said, *_) = name_of(type(self._method)), str(error).splitlines() or [""]
            if isinstance(error, jax.errors.JAXTypeError):
                said = "it needs numbers that a compiled program has not yet: use xp, not NumPy, and xp.where, not if"
            place = line_of(error, type(self._method).__module__)
            raise ConfigError(f"kv_eviction {method}: {name}{place}: {type(error).__name__}: {said}") from None


def output_norms(cached: Cached, outputs: jax.Array) -> jax.Array:
    """Returns `Cached.output_norms`, one head of one layer at a time: a product takes [C, D]."""
    n, num_layers, kv_heads, num_slots, _ = cached.values.shape
    heads = outputs.shape[2]

    def norms(index):
        row, layer, head = index
        values = cached.values[row, layer, head * kv_heads // heads].astype(jnp.float32)
        matrix = outputs[cached.group[row], layer, head].astype(jnp.float32)
        return jnp.abs(values @ matrix).sum(axis=-1)

    indices = jnp.unravel_index(jnp.arange(n * num_layers * heads), (n, num_layers, heads))
    return jax.lax.map(norms, indices).reshape(n, num_layers, heads, num_slots)


def measure(cache: KVCache, asked: Evictions, facts: Facts, *, method: EvictionMethod, cached: Any) -> jax.Array:
    """Returns what a method measures of rows, [n, Lg, 1, K, ...] float32; changes nothing.

    Args:
      cached: returns a method's input, see `evicting.cached`.
    """
    leaves, _, _, state = _states(cache, asked, asked.num_tokens)
    cache = cache.with_leaves(leaves)
    found = StatisticsEviction(method, facts, state).measure(cached(cache, asked), jnp)
    return found[:, :, None].astype(jnp.float32)


def _states(cache: KVCache, asked: Evictions, num_tokens: jax.Array) -> tuple[dict[str, jax.Array], Any, Any, Any]:
    """Returns the pool's leaves without STATE; and this leaf, the first slots [P] of blocks, and the states
    [n, Lg, K, ...] of rows, or None for all."""
    leaves = dict(cache.leaves)
    if (leaf := leaves.pop(STATE, None)) is None:
        return leaves, None, None, None
    parts = leaf[asked.tables][:, :, :, 0]
    starts = jnp.arange(parts.shape[1]) * cache.block_size
    used = starts < num_tokens[:, None]
    return leaves, leaf, starts, jnp.where(used.reshape(*used.shape, *(1,) * (parts.ndim - 2)), parts, 0).sum(axis=1)


def with_state(
    evict: Any, cache: KVCache, asked: Evictions, facts: Facts, *, method: EvictionMethod
) -> tuple[KVCache, jax.Array]:
    """Makes evictions by `evict`, whose method is told the facts and the states of the rows.

    Returns:
      The pool, and `StatisticsEviction.is_nan`.
    """
    num_before, num_after = (asked.length,) * 2 if method.hides else (asked.num_tokens, asked.num_kept)
    leaves, leaf, starts, state = _states(cache, asked, num_before)
    told = StatisticsEviction(method, facts, state)
    if leaf is None:
        return evict(cache, asked, method=told), told.is_nan
    moved = evict(cache.with_leaves(leaves), asked, method=told)
    assert told.state is not None
    # The first block has the state of all; a row of padding keeps nothing.
    targets = jnp.where(starts < num_after[:, None], asked.targets, cache.num_blocks)
    leaf = leaf.at[targets].set(0, mode="drop")
    leaf = leaf.at[targets[:, 0], :, 0].set(
        told.state * (bool(method.low_codec) or not method.resets_scores), mode="drop"
    )
    return moved.with_leaves(moved.leaves | {STATE: leaf}), told.is_nan
