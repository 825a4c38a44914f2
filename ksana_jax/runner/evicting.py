"""Evicts tokens from rows on the device: a method chooses, and the kept tokens move to the row's first slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import name_of
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.eviction.base import Cached, EvictionMethod
from ksana_jax.kv.layout import EXACT, HIDDEN, OF_TOKENS, SCORE, TEXT_POSITION, KVLayout
from ksana_jax.kv.moves import Evictions
from ksana_jax.models.params import Params
from ksana_jax.models.rope import Rope
from ksana_jax.ops.pool import EXACT_CODECS, KVCache, stored
from ksana_jax.ops.sealed_pool import SealedCache
from ksana_jax.runner.compiling import compiled, lower
from ksana_jax.runner.demoting import Split, demoted
from ksana_jax.runner.program_key import Lowering
from ksana_jax.runner.ranking import apart, kept_slots, ranked
from ksana_jax.runner.statistics_eviction import facts_of, measure, with_state
from ksana_jax.sharding.placement import Placement
from ksana_jax.sharding.specs import BY_HEAD

# Blocks whose tokens one call moves, unless a single row has more; bounds its temporary memory.
BLOCKS_AT_ONCE = 64


class Evictor:
    """Makes the evictions of `kv.moves.Moves` on a pool.

    Args:
      layout, num_blocks: of the pool.
      table_width: maximum blocks of a row in one group of layers, whatever the budget.
      placement: of the pool on devices.
      ropes, params: of the model, for methods that read them; the weights may change, see `forget`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        table_width: int,
        ropes: Sequence[Rope],
        placement: Placement,
        params: Callable[[], Params],
    ):
        self._layout, self._num_blocks, self.table_width, self._placement = layout, num_blocks, table_width, placement
        self._ropes, self._params, self._facts = ropes, params, None
        self._facts_of = functools.partial(facts_of, layout=layout, ropes=ropes)
        self._shapes = jax.eval_shape(self._facts_of, params())
        widths = [table_width]
        while widths[-1] > 4:
            widths.append(-(-widths[-1] // 4))
        self._widths = widths[::-1]
        self._compiled: dict[tuple[Callable, int, int], Callable] = {}

    def _sizes(self, width: int) -> tuple[int, ...]:
        """Returns the numbers of rows for which functions are compiled: n rows take the smallest that holds them."""
        return tuple(dict.fromkeys((1, max(BLOCKS_AT_ONCE // width, 1))))

    def _width(self, used: int) -> int:
        return next(width for width in self._widths if width >= used)

    def forget(self) -> None:
        """Frees what it holds on the device; the weights may change."""
        self._facts = None

    @property
    def programs(self) -> list[Callable]:
        """Compiled functions."""
        return list(self._compiled.values())

    def warm_up(self, table_width: int) -> None:
        """Compiles the functions that evictions from rows of up to table_width blocks can need."""
        largest = self._width(table_width)
        for width in [width for width in self._widths if width <= largest]:
            for size in self._sizes(width):
                for lowers in self._lowers:
                    self._function(lowers, size, width)

    @property
    def _lowers(self) -> tuple[Callable, ...]:
        assert self._layout.eviction is not None
        return (lower_evictions, *(lower_measurements,) * self._layout.eviction.method.measures)

    def measure(self, cache: KVCache, asked: Evictions) -> np.ndarray:
        """Returns what the method measures of rows, of which each is in one group: [n, Lg, K, ...]."""
        width, found = self._width(asked.tables.shape[1]), []
        most = self._sizes(width)[-1]
        for first in range(0, len(asked.tables), most):
            some = Evictions(*(None if x is None else x[first : first + most] for x in asked))
            found.append(self._run(lower_measurements, cache, some, width))
        return np.concatenate([np.asarray(x) for x in found])[: len(asked.tables), :, 0]

    def start(self, cache: KVCache, asked: Evictions, checks: list[Callable[[], None]]) -> KVCache:
        """Starts evictions on the device; returns the pool, and adds what the host checks later, see `_check`."""
        width, is_nan = self._width(asked.tables.shape[1]), []
        most = self._sizes(width)[-1]
        for first in range(0, len(asked.tables), most):
            some = Evictions(*(None if x is None else x[first : first + most] for x in asked))
            cache, found = self._run(lower_evictions, cache, some, width)
            is_nan.append(found)
        checks.append(functools.partial(self._check, asked, is_nan))
        return cache

    def _check(self, asked: Evictions, is_nan: Sequence[jax.Array]) -> None:
        """Waits for evictions. is_nan: [n, Lg, 1, K] of each call.

        Raises:
          ConfigError: the priority of a token that may go was NaN.
        """
        assert self._layout.eviction is not None
        for row, place in np.argwhere(np.concatenate(is_nan).any(axis=(2, 3))):
            layers = self._layout.groups[asked.group[row]].layers
            if place < len(layers):  # the last groups of a kind may have fewer
                name = name_of(type(self._layout.eviction.method))
                at = f"in layer {layers[place]} when a sequence has {asked.length[row]:,} tokens"
                raise ConfigError(f"kv_eviction {name}: priority is NaN {at}")

    def _run(self, lowers: Callable, cache: KVCache, asked: Evictions, width: int) -> Any:
        """Calls a function of `_lowers` on rows, which are padded to a number of rows for which it is compiled."""
        tables, targets, *columns, given = asked
        count, used = tables.shape
        size = next(s for s in self._sizes(width) if s >= count)
        # A row of padding keeps nothing, so it writes nothing.
        tables, targets = (np.pad(x, ((0, size - count), (0, width - used))) for x in (tables, targets))
        columns = (np.pad(x, (0, size - count)) for x in columns)
        if given is not None:
            more = (size - count, 0, 0, self._given_shape[-1] - given.shape[-1])
            given = np.pad(given, [(0, n) for n in more])
        self._facts = self._facts or self._facts_of(self._params())
        run = self._function(lowers, size, width)
        return run(cache, Evictions(tables, targets, *columns, given=given), self._facts)

    @property
    def _given_shape(self) -> tuple[int, ...]:
        layout = self._layout
        _, _, heads, block_size = layout.leaf(TEXT_POSITION).shape
        return len(layout.groups[0].layers), heads, self.table_width * block_size

    def _function(self, lowers: Callable, size: int, width: int) -> Callable:
        key = (lowers, size, width)
        if key not in self._compiled:
            assert self._layout.eviction is not None
            ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
            pool = jax.eval_shape(functools.partial(self._placement.pool, self._layout, self._num_blocks))
            method = self._layout.eviction.method.compiled
            given = jax.ShapeDtypeStruct((size, *self._given_shape), jnp.float32) if method.needs_full_text else None
            asked = Evictions(*[ints((size, width))] * 2, *[ints((size,))] * (len(Evictions._fields) - 3), given=given)
            lowering = Lowering(lowers, pool, asked, self._shapes, method=method, placement=self._placement)
            name = "evict" if lowers is lower_evictions else "measure"
            self._compiled[key] = compiled((name, size, width), lowering)
        return self._compiled[key]


def lower_evictions(*arguments: Any, method: EvictionMethod, placement: Placement) -> Any:
    """Lowers `evict` by a method, which donates the pool. arguments: its pool and rows, and the method's facts."""
    run = functools.partial(with_state, evict, method=method)
    return lower(placement.jit(run, returns=(BY_HEAD, BY_HEAD), donated=0), *arguments)


def lower_measurements(*arguments: Any, method: EvictionMethod, placement: Placement) -> Any:
    """Lowers `measure` by a method, which reads the pool only; arguments as in `lower_evictions`."""

    def cached(cache: KVCache, asked: Evictions) -> Cached:
        return _cached(cache, _rows(cache, asked), asked)

    run = functools.partial(measure, method=method, cached=cached)
    return lower(placement.jit(run, returns=BY_HEAD), *arguments)


def _rows(cache: KVCache, asked: Evictions) -> dict[str, jax.Array]:
    """Returns the leaves of rows, by slot; without those of a block codec, which have no slots."""
    sealed = isinstance(cache, SealedCache)
    return {name: _by_slot(leaf[asked.tables]) for name, leaf in cache.leaves.items() if not (sealed and name == "kv")}


def evict(cache: KVCache, asked: Evictions, *, method: EvictionMethod) -> KVCache:
    """Moves the tokens that a method keeps to the first slots of their rows, in their order, or hides the others.

    Args:
      asked: n rows, each in one group of layers.
    """
    rows = _rows(cache, asked)
    if isinstance(cache, SealedCache):
        return _evict_codes(cache, rows, asked, method)
    if method.hides:
        num_slots, new = asked.length, rows | {HIDDEN: _hidden(cache, rows, asked, method)}
    elif method.low_codec:
        num_slots, new = asked.num_kept, _demoted(cache, rows, asked, method)
    else:
        num_slots, cached = asked.num_kept, _cached(cache, rows, asked)
        order = ranked(cached, asked, method)
        if method.merges:
            rows = rows | _merged(cache, rows, cached, order, asked, method)
        new = _moved(cache, rows, kept_slots(order, asked))
    return _written(cache, new, _targets(cache, asked, num_slots), method)


def _evict_codes(cache: SealedCache, rows: dict[str, jax.Array], asked: Evictions, method: EvictionMethod) -> KVCache:
    """Returns a pool of a block codec after evictions of whole blocks of tokens.

    The method sees the tokens of full blocks, as their codes decode them. Those of the block that is being filled stay.
    """
    slots, open_tokens = jnp.arange(asked.tables.shape[1] * cache.size), asked.num_tokens % cache.size
    counts = {name: getattr(asked, name) - open_tokens for name in ("num_tokens", "num_recent", "num_kept")}
    seen, (codes, kv) = asked._replace(**counts), cache.read_all(asked.tables)
    full = seen.num_kept[:, None, None, None]
    order = ranked(_with_data(rows, kv, seen), seen, method)
    after = jnp.minimum(slots + (asked.num_tokens - asked.num_kept)[:, None, None, None], slots[-1])
    source = jnp.where(slots < full, kept_slots(order, seen), after)
    targets = _targets(cache, asked, asked.num_kept)
    return _written(cache.with_moved(targets, source, codes, kv), _moved(cache, rows, source), targets, method)


def _targets(cache: KVCache, asked: Evictions, num_slots: jax.Array) -> jax.Array:
    """Returns the blocks [n, P] of rows' first num_slots slots; M beyond them."""
    blocks = jnp.arange(asked.tables.shape[1]) * cache.block_size < num_slots[:, None]
    return jnp.where(blocks, asked.targets, cache.num_blocks)


def _written(cache: KVCache, new: dict[str, jax.Array], targets: jax.Array, method: EvictionMethod) -> KVCache:
    """Returns the pool with new leaves of rows, by slot."""
    if method.resets_scores:
        new[SCORE] = jnp.zeros_like(new[SCORE])
    written = {
        name: cache.leaves[name].at[targets].set(_by_block(x, cache.block_size), mode="drop") for name, x in new.items()
    }
    return cache.with_leaves(cache.leaves | written)


def _moved(cache: KVCache, rows: dict[str, jax.Array], source: jax.Array) -> dict[str, jax.Array]:
    """Returns rows whose tokens come from other slots, [n, Lg, K, C]."""
    found, num_exact = {}, _num_exact(cache)
    for name, x in rows.items():
        of_layers = source
        if name not in OF_TOKENS:
            of_layers = source[:, :num_exact] if name == EXACT else source[:, num_exact:]
        found[name] = jnp.take_along_axis(x, jnp.expand_dims(of_layers, (2, *range(5, x.ndim))), axis=4)
    return found


def _merged(
    cache: KVCache,
    rows: dict[str, jax.Array],
    cached: Cached,
    order: jax.Array,
    asked: Evictions,
    method: EvictionMethod,
) -> dict[str, jax.Array]:
    """Returns the leaves of keys and values in which tokens that stay hold those that the method merges into them.

    Tokens into which nothing is merged keep their codes.
    """
    stays = jnp.argsort(order, axis=-1) < asked.num_kept[:, None, None, None]
    into, weights, _ = method.merge(cached, stays, jnp)
    goes = (jnp.arange(order.shape[-1]) < asked.num_tokens[:, None, None, None]) & ~stays
    into = jnp.where(goes & (weights > 0), into, jnp.arange(order.shape[-1]))

    def summed(x):  # [n, Lg, K, C, ...], by the slots that tokens are merged into
        add = jax.vmap(lambda into, x: jnp.zeros_like(x).at[into].add(x))
        return add(into.reshape(-1, into.shape[-1]), x.reshape(-1, *x.shape[3:])).reshape(x.shape)

    changed = stays & (summed(jnp.ones_like(into)) > 1)
    weights = jnp.where(stays | goes, weights, 0)
    total = jnp.where(changed, summed(weights), 1)[..., None]
    # Unused slots hold anything, also NaN.
    parts = (jnp.where((stays | goes)[..., None], x, 0).astype(jnp.float32) for x in (cached.keys, cached.values))
    keys, values = (_encoded(cache, summed(weights[..., None] * x) / total) for x in parts)
    found, num_exact = {}, _num_exact(cache)
    for name in keys:
        of_layers = changed[:, :num_exact] if name == EXACT else changed[:, num_exact:]
        of_layers = jnp.expand_dims(of_layers, (2, *range(5, rows[name].ndim)))
        found[name] = jnp.where(of_layers, jnp.stack([keys[name], values[name]], axis=2), rows[name])
    return found


def _demoted(
    cache: KVCache, rows: dict[str, jax.Array], asked: Evictions, method: EvictionMethod
) -> dict[str, jax.Array]:
    """Returns rows after an eviction that keeps other tokens in fewer bits."""
    head_dim = jax.eval_shape(lambda: _cached(cache, rows, asked).keys).shape[-1]
    split = Split.of(rows, asked, method, head_dim)
    high = _moved(cache, rows, split.high_first)
    cached = _cached(cache, high, split.asked)
    order = ranked(cached, split.asked, method)
    move = functools.partial(_moved, cache, high)
    return demoted(rows, split, cached, order, kept_slots(order, split.asked), move, method)


def _hidden(cache: KVCache, rows: dict[str, jax.Array], asked: Evictions, method: EvictionMethod) -> jax.Array:
    """Returns the leaf HIDDEN after an eviction.

    The method reads the tokens that are not hidden as if they had moved together.
    """
    slots = jnp.arange(rows[HIDDEN].shape[4])
    hidden = rows[HIDDEN][:, :, 0] | (slots >= asked.length[:, None, None, None])
    seen_first = jnp.argsort(hidden, axis=-1)  # stable
    order = ranked(_cached(cache, _moved(cache, rows, seen_first), asked), asked, method)
    heads = order.shape[-1] // len(slots)  # that share a budget
    goes = jnp.argsort(order, axis=-1) >= (heads * asked.num_kept)[:, None, None, None]
    if method.per_head:
        goes = apart(goes, method, hidden.shape)
    return jnp.take_along_axis(goes, jnp.argsort(seen_first, axis=-1), axis=-1)[:, :, None]


def _cached(cache: KVCache, rows: dict[str, jax.Array], asked: Evictions) -> Cached:
    """Returns a method's input. rows: leaves of the rows, by slot."""
    stored = {name: x for name, x in rows.items() if name not in OF_TOKENS}
    kv = (_decoded(cache, {name: x[:, :, side] for name, x in stored.items()}) for side in (0, -1))
    return _with_data(rows, kv, asked)


def _with_data(rows: dict[str, jax.Array], kv: Iterable[jax.Array], asked: Evictions) -> Cached:
    """Returns a method's input of decoded keys and values."""
    score, text_positions = (rows[name][:, :, 0] if name in rows else None for name in (SCORE, TEXT_POSITION))
    if score is not None and rows[SCORE].shape[2] > 1:
        score = jnp.moveaxis(rows[SCORE], 2, -1)
    given = None
    if asked.given is not None:
        assert text_positions is not None
        given = jnp.take_along_axis(asked.given, text_positions, axis=-1, mode="clip")
    counts = asked.num_tokens, asked.num_recent, asked.length
    counts = *counts, asked.group, given, asked.num_kept, asked.num_sinks, asked.num_prompt
    keys, values = kv
    return Cached(keys, values, score, text_positions, *counts)


def _num_exact(cache: KVCache) -> int:
    """Returns the number of a group's layers in full precision, which come first."""
    return cache.leaves[EXACT].shape[1] if EXACT in cache.leaves else 0


def _decoded(cache: KVCache, parts: dict[str, jax.Array]) -> jax.Array:
    """Decodes keys or values [n, Lg, K, C, H] of all layers."""
    if EXACT not in parts:
        return cache.decoded(parts)
    exact = KVCache({}, EXACT_CODECS[parts[EXACT].dtype.name]).decoded({"kv": parts[EXACT]})
    return jnp.concatenate([x.astype(jnp.float32) for x in (exact, cache.decoded(parts))], axis=1)


def _encoded(cache: KVCache, x: jax.Array) -> dict[str, jax.Array]:
    """Encodes keys or values [n, Lg, K, C, H] of all layers to parts of leaves."""
    num_exact, exact = _num_exact(cache), {}
    if num_exact:
        dtype = cache.leaves[EXACT].dtype
        [part] = find_codec(EXACT_CODECS[dtype.name]).encode(x[:, :num_exact], jnp).values()
        exact = {EXACT: stored(part, dtype)}
    parts = find_codec(cache.codec).encode(x[:, num_exact:], jnp)
    return {name: stored(part, cache.leaves[name].dtype) for name, part in parts.items()} | exact


def _by_slot(x: jax.Array) -> jax.Array:
    """[n, P, Lg, X, K, B, ...] to [n, Lg, X, K, P*B, ...]."""
    x = jnp.moveaxis(x, 1, 4)
    return x.reshape(*x.shape[:4], -1, *x.shape[6:])


def _by_block(x: jax.Array, block_size: int) -> jax.Array:
    """[n, Lg, X, K, P*B, ...] to [n, P, Lg, X, K, B, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:4], -1, block_size, *x.shape[5:]), 4, 1)
