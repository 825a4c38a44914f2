"""Copies whole blocks between the device's and the host's pools, and within the device's. Knows arrays and indices."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.devices.capabilities import capabilities
from ksana_jax.kv.layout import KV_HEADS, KVLayout
from ksana_jax.kv.moves import Moves
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.compiling import compiled, lower
from ksana_jax.runner.program_key import Lowering
from ksana_jax.sharding.placement import ONE_DEVICE, Placement
from ksana_jax.sharding.specs import BY_HEAD

# Blocks moved by one call; a move of n takes the smallest that holds it, and several calls beyond the largest.
SIZES = (1, 8, 64)
# Moves that the host waits for, to measure their cost.
NUM_TIMED = 4
# Slots of the host, and the leaves that will go there.
Saved: TypeAlias = tuple[np.ndarray, KVCache]


class BlockMover:
    """Makes the copies of `kv.moves.Moves` on a pool, for all its leaves.

    Args:
      layout, num_blocks: of the pool.
      num_slots: blocks of the host, preallocated.
      staging: memory that blocks cross between device and host: "pinned_host", from which a device copies
        without the processor, "none", or "auto" (`devices.capabilities`).
      placement: of the pool. Blocks on the host store each kv head once, however many devices have it.
      num_states: slots of the host for states of recurrent layers.
      of_states: moves these, num_slots of them on the host, instead of the blocks.

    Attributes:
      states: moves the slots of recurrent layers, as blocks of a pool of their own; None without any.
      host_blocks: [num_slots, block_bytes] uint8; each has the leaves one after the other, see `KVLayout.split`.

    Raises:
      ValueError: the device has no such memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        num_slots: int,
        staging: str = "auto",
        placement: Placement = ONE_DEVICE,
        num_states: int = 0,
        of_states: bool = False,
    ):
        self.states: BlockMover | None = None
        pool, host, states = placement.pool_layout(layout), placement.host_layout(layout), layout.states
        if of_states:
            assert states and pool.of_states and host.of_states
            pool, host, places = pool.of_states, host.of_states, states.places(placement.num_devices)
        else:
            heads = np.arange(host.num_kv_heads)
            heads = heads.repeat(pool.num_kv_heads * placement.num_local // placement.num_devices // len(heads))
            places = {leaf.name: heads for leaf in host.leaves}
            if states is not None:
                self.states = BlockMover(layout, states.num_slots, num_states, staging, placement, of_states=True)
        self._placement, self._pool_layout, self._layout = placement, pool, host
        self._num_blocks, self._num_slots = num_blocks, num_slots
        # The host's heads or channels in the order of the devices', of leaves where they differ.
        self._places = {name: at for name, at in places.items() if not np.array_equal(at, np.arange(len(at)))}
        self._places |= {} if self.states is None else self.states._places  # of leaves with other names
        self.reset()
        self._pool = jax.eval_shape(functools.partial(make_cache, self._pool_layout, num_blocks))
        self._compiled: dict[Any, Callable] = {}
        self._num_timed = 0
        self._on_device = placement.by_head()
        self._staged = self._staging = None
        if (kind := capabilities().staging if staging == "auto" else staging) != "none":
            self._staging, self._staged = kind, placement.by_head(kind)

    @property
    def functions(self) -> dict[Any, Callable]:
        """Functions compiled so far, by kind and number of blocks."""
        return self._compiled

    def reset(self) -> None:
        """Reallocates the host's blocks; late writes to the old ones do no harm."""
        self.host_blocks = np.zeros((self._num_slots, self._layout.block_bytes), np.uint8)
        self._host = self._layout.split(self.host_blocks)
        if self.states is not None:
            self.states.reset()
            self._host |= self.states._host  # of leaves with other names

    @property
    def num_compilations(self) -> int:
        return len(self._compiled) + (0 if self.states is None else self.states.num_compilations)

    def warm_up(self) -> None:
        """Compiles the functions that any moves can need."""
        if self.states is not None:
            self.states.warm_up()
        for size in SIZES:
            for function in (self._copy, self._gather, self._scatter):
                function(size)

    def save(self, cache: KVCache, saves: np.ndarray) -> list[Saved]:
        """Starts saves on the device; returns the saves that `finish` must complete."""
        saved = []
        for ids, slots in _pieces(saves):
            out = self._gather(len(ids))(cache, ids)
            saved.append((slots, out if self._staged is None else jax.device_put(out, self._staged)))
        return saved

    def start(
        self, cache: KVCache, moves: Moves, early: Sequence[Saved] = (), num_saved: int = 0
    ) -> tuple[KVCache, list[Saved], float]:
        """Starts moves on the device, except evictions.

        Args:
          early: results of `save` for the first num_saved saves.

        Returns:
          The pool, saves that `finish` must complete, and the seconds it took if the host waited, or 0.
        """
        timed = self._num_timed < NUM_TIMED and all(key in self._compiled for key in self._needed(moves))
        if timed:
            self._num_timed += 1
            jax.block_until_ready(cache)
        began = time.perf_counter()
        if moves.states is not None and self.states is not None:
            slots, of_states, _ = self.states.start(states_of(cache), moves.states)
            cache, early = with_states(cache, slots), [*of_states, *early]
        saved = [*early, *self.save(cache, moves.saves[num_saved:])]
        copies = _pieces(moves.copies)
        # With several pieces, all are read before one is written.
        read = [(len(old), self._gather(len(old))(cache, old), new) for old, new in copies[1:]]
        for old, new in copies[:1]:
            cache = self._copy(len(old))(cache, old, self._targets(new, len(old)))
        for size, data, new in read:
            cache = self._scatter(size)(cache, self._targets(new, size), data)
        if len(moves.loads) and set(moves.loads[:, 0].tolist()) & set(moves.saves[:, 1].tolist()):
            self.finish(saved)
            saved = []
        cache = self._load(cache, moves.loads)
        if timed:
            jax.block_until_ready([cache, saved])
            self.finish(saved)
            return cache, [], time.perf_counter() - began
        return cache, saved, 0.0

    def finish(self, saved: list[Saved], checks: Sequence[Callable[[], None]] = ()) -> None:
        """Copies finished saves to the host's blocks, and calls the checks of the step's evictions."""
        self._finish(saved, self._host)
        for check in checks:
            check()

    def read(self, cache: KVCache, ids: np.ndarray) -> np.ndarray:
        """Returns the bytes of device blocks: [n, block_bytes] uint8, as in `host_blocks`. ids: [n]."""
        blocks = np.empty((len(ids), self._layout.block_bytes), np.uint8)
        self._finish(self.save(cache, _in_order(ids)[:, ::-1]), self._layout.split(blocks))
        return blocks

    def write(self, cache: KVCache, ids: np.ndarray, blocks: np.ndarray) -> KVCache:
        """Returns the pool with the bytes [n, block_bytes] of blocks at ids [n]."""
        return self._load(cache, _in_order(ids), self._layout.split(blocks))

    def read_states(self, cache: KVCache, slots: np.ndarray) -> np.ndarray:
        """Returns the bytes of states: [n, slot_bytes] uint8; see `read`."""
        assert self.states is not None
        return self.states.read(states_of(cache), slots)

    def write_states(self, cache: KVCache, slots: np.ndarray, states: np.ndarray) -> KVCache:
        """Returns the pool with the bytes [n, slot_bytes] of states at slots [n]."""
        assert self.states is not None
        return with_states(cache, self.states.write(states_of(cache), slots, states))

    def _finish(self, saved: list[Saved], host: dict[str, np.ndarray]) -> None:
        for slots, data in saved:
            for name, leaf in data.leaves.items():
                heads = self._placement.to_host(leaf)
                if (places := self._places.get(name)) is not None:
                    heads = heads.take(np.unique(places, return_index=True)[1], axis=1 + KV_HEADS)
                host[name][slots] = heads[: len(slots)]

    def _load(self, cache: KVCache, loads: np.ndarray, host: dict[str, np.ndarray] | None = None) -> KVCache:
        """Returns the pool with blocks of the host, given pairs [n, 2] of slots and device blocks."""
        host = host or {leaf.name: self._host[leaf.name] for leaf in self._layout.leaves}
        for slots, ids in _pieces(loads):
            data = self._blocks({name: leaf[slots] for name, leaf in host.items()})
            cache = self._scatter(len(slots))(cache, self._targets(ids, len(slots)), data)
        return cache

    def _blocks(self, leaves: dict[str, np.ndarray]) -> KVCache:
        """Starts copies of the host's blocks to the devices; returns them as blocks of the pool."""
        for name in self._places.keys() & leaves.keys():
            leaves = leaves | {name: leaves[name].take(self._places[name], axis=1 + KV_HEADS)}
        put = functools.partial(self._placement.from_host, memory_kind=self._staging)
        blocks = {name: put(leaf) for name, leaf in leaves.items()}
        data = self._pool.replace(leaves=blocks, states={})  # pyright: ignore[reportAttributeAccessIssue]
        # The compiled scatter refuses pinned memory.
        return data if self._staged is None else jax.device_put(data, self._on_device)

    def _needed(self, moves: Moves) -> list[tuple[str, int]]:
        kinds = (("gather", moves.saves), ("copy", moves.copies), ("scatter", moves.loads))
        return [(kind, len(ids)) for kind, pairs in kinds for ids, _ in _pieces(pairs)]

    def _gather(self, size: int) -> Callable:
        return self._function("gather", size, _gathered, self._ids(size), donates=False)

    def _scatter(self, size: int) -> Callable:
        data = jax.eval_shape(functools.partial(make_cache, dataclasses.replace(self._pool_layout, states=None), size))
        return self._function("scatter", size, _scattered, self._ids(size), data)

    def _copy(self, size: int) -> Callable:
        return self._function("copy", size, _copied, self._ids(size), self._ids(size))

    @staticmethod
    def _ids(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    def _targets(self, ids: np.ndarray, size: int) -> np.ndarray:
        """Returns target ids, padded with an id that does not exist."""
        return np.pad(ids, (0, size - len(ids)), constant_values=self._num_blocks)

    def _function(self, name: str, size: int, run: Callable, *arguments: Any, donates: bool = True) -> Callable:
        key = (name, size)
        if key not in self._compiled:
            settings = {"run": run, "placement": self._placement, "donated": 0 if donates else None}
            self._compiled[key] = compiled(key, Lowering(lower_move, self._pool, *arguments, **settings))
        return self._compiled[key]


def lower_move(*arguments: Any, run: Callable, placement: Placement, donated: int | None) -> Any:
    """Lowers a function of a pool that returns a pool. arguments: of the function. donated: index of one of them."""
    return lower(placement.jit(run, returns=BY_HEAD, donated=donated), *arguments)


def states_of(cache: KVCache) -> KVCache:
    """Returns the slots of recurrent layers as blocks, see `KVLayout.of_states`."""
    return KVCache(cache.states, cache.codec)


def with_states(cache: KVCache, slots: KVCache) -> KVCache:
    """Returns the pool with other slots."""
    return cache.replace(states=slots.leaves)  # pyright: ignore[reportAttributeAccessIssue]


def _gathered(cache: KVCache, ids: jax.Array) -> KVCache:
    leaves = {name: leaf[ids] for name, leaf in cache.leaves.items()}
    return cache.replace(leaves=leaves, states={})  # pyright: ignore[reportAttributeAccessIssue]


def _scattered(cache: KVCache, ids: jax.Array, data: KVCache) -> KVCache:
    leaves = {name: leaf.at[ids].set(data.leaves[name], mode="drop") for name, leaf in cache.leaves.items()}
    return cache.replace(leaves=leaves)  # pyright: ignore[reportAttributeAccessIssue]


def _copied(cache: KVCache, old: jax.Array, new: jax.Array) -> KVCache:
    return _scattered(cache, new, _gathered(cache, old))


def _in_order(ids: np.ndarray) -> np.ndarray:
    """Returns pairs [n, 2] of the places 0 to n - 1 and ids [n]."""
    return np.stack([np.arange(len(ids), dtype=np.int32), ids], axis=1)


def _pieces(pairs: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Yields source and target ids in batches of SIZES; sources are padded with the last one, targets are not."""
    found = []
    for start in range(0, len(pairs), SIZES[-1]):
        some = pairs[start : start + SIZES[-1]]
        size = next(s for s in SIZES if s >= len(some))
        found.append((np.pad(some[:, 0], (0, size - len(some)), mode="edge"), some[:, 1]))
    return found
